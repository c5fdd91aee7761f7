"""What the network computes: configs, parameters, forward, sampling, loading and saving weights."""
