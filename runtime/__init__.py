"""Running the model: scheduler, steps, engine loop, tokenising, HTTP."""
