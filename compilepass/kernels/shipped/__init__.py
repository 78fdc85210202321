"""The ops that ship, in the namespace ``compilepass``: schemas, fakes, native references.

A fake checks the shapes that the mathematics needs, since a kernel behind compiled code trusts it.
"""

from . import activations, linear, norms, quantisation, rotary

__all__ = ["SHIPPED"]

SHIPPED = (*activations.OPS, *linear.OPS, *norms.OPS, *quantisation.OPS, *rotary.OPS)
