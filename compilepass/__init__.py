"""compilepass: decide once, per operation, native code or a platform kernel, from eager to compiled."""

__version__ = "0.1.0"
__all__ = ["__version__"]
