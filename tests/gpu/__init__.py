"""The claims about Hopper, on unmodified releases, each in fresh processes, stock and plugin."""
