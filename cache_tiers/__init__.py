"""What to keep of computed prefixes, where, and what to bring back: pure decisions and bookkeeping.

Everything here runs on the engine thread, but for `disk_files`, which several threads use. `prefix_cache.PrefixCache`
is the facade the engine calls, `arena.PageArena` the one accounting of device pages.
"""
