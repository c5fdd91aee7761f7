"""The inner loops of the model, a folder each. Pure functions on arrays: no state, no thread of their own.

Every entry point is local (called on one device or inside `shard_map`), checks its arguments while tracing, picks a
backend from a static table and calls it. Imports jax only.
"""
