"""All that a package can bring to compilepass from outside of its tree, one kind a module.

Nothing is imported here: compilepass imports each module through its entry point in pyproject.toml,
when it first needs that kind.
"""
