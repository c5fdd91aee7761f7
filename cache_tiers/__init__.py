"""What to keep of computed prefixes, where, and what to bring back: pure decisions and bookkeeping.

Standard library and NumPy only; everything here runs on the engine thread. `prefix_cache.PrefixCache` is
the facade the engine calls, `arena.PageArena` the one accounting of device pages.
"""
