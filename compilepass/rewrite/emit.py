"""Put a replacement into the graph: record it on fake tensors, check its contract, edit.

The replacement is recorded once per rule and kind of site (shapes, strides, dtypes, numbers), for
all graphs where the sizes are known, and that recording is copied to each site of the kind. All
checks come before the first edit; an edit that cannot be completed is undone.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map

from ..errors import PatternError
from ..kernels import find
from ..torch_compat import fake_like
from .canonical import Canonical
from .contract import breaks_contract, shares_memory
from .layout import is_row_major, layout
from .memory_order import memory_order
from .operations import is_split
from .record import Call, Decompositions, MutationError, Recording, record
from .region import Form
from .reject import Reject
from .site import Site
from .term import product, same, size_of
from .trace import size_symbol
from .verify import find_difference

__all__ = ["Emitter"]

_ORIGIN: tuple[str, ...] = ("stack_trace", "nn_module_stack")

aten = torch.ops.aten


@dataclass(frozen=True)
class _Template:
    recording: Recording
    kernels: tuple[Any, ...]
    refusal: Reject | None
    shares: Reject | None  # why it may not be put where shared memory shows


class Emitter:
    """Rewrites sites of one graph and keeps ``canonical`` up to date."""

    def __init__(
        self,
        graph: Graph,
        canonical: Canonical,
        *,
        decompositions: Decompositions,
        recordings: dict[Any, Recording],
        has_writes: bool,
        verify: bool,
        any_kernel: bool,
    ) -> None:
        self._graph = graph
        self._canonical = canonical
        self._decompositions = decompositions  # nothing decomposes the graph after the passes
        self._recordings = recordings  # those of all graphs whose sizes are known
        self._has_writes = has_writes
        self._verify, self._any_kernel = verify, any_kernel
        self._verified: dict[int, Reject | None] = {}  # by the template, which stands for its sites
        self._templates: dict[Any, _Template] = {}
        self._by_form: dict[Form, _Template] = {}
        self._views: dict[Any, Node] = {}  # by what they view and how: many sites share a table
        self._sizes: dict[sympy.Expr, list[Node]] | None = None

    def rewrite(self, site: Site) -> list[Node] | Reject | None:
        """Replace ``site``; the new nodes, a refusal, or ``None`` if it is fused already."""
        template = self._template(site)
        if _is_done(site, template):
            return None
        if template.refusal is not None:
            return template.refusal.at(site.anchor)
        if template.shares is not None and self._is_visible(site):
            return template.shares.at(site.anchor)
        made: list[Node] = []
        try:
            new_outputs = self._insert(site, template, made)
        except Exception as error:
            reject = _as_reject(error, f"the replacement of {site.match.rule} cannot be put in")
            return self._undo(made, reject.at(site.anchor))
        wrong = self._difference(site, template, new_outputs) if self._verify else None
        if wrong is not None:
            return self._undo(made, wrong)
        old = [self._canonical.known(o) if o is not None else None for o in site.outputs]
        self._redirect(site, new_outputs)
        if site.must_sort:
            _stable_sort(self._graph)
        for node in made:
            self._canonical.add(node)
        for term, node in zip(old, new_outputs, strict=True):
            if term is not None:
                self._canonical.replace(term, node, made)
        return made

    def _difference(self, site: Site, template: _Template, new: list[Node]) -> Reject | None:
        """What running both sides shows, once per kind of site."""
        key = id(template)
        if key not in self._verified:
            inputs = list(site.match.inputs.values())
            self._verified[key] = find_difference(site.match.rule, site.outputs, new, inputs)
        reject = self._verified[key]
        return reject.at(site.anchor) if reject is not None else None

    def _is_visible(self, site: Site) -> bool:
        """Whether it can be told that an output shares its memory with another value."""
        todo = [o for o in site.outputs if o is not None]
        for node in todo:
            for user in node.users:
                if user.op == "output":
                    return True
                if self._canonical.is_transparent(user):
                    todo.append(user)
        return self._has_writes

    def _undo(self, made: list[Node], reject: Reject) -> Reject:
        """Take back what was put in, and pass the refusal on."""
        for node in reversed(made):
            self._graph.erase_node(node)
        return reject

    # -- recording -----------------------------------------------------------------------------

    def _template(self, site: Site) -> _Template:
        if site.form is None:
            return self._recorded(site)
        if site.form not in self._by_form:
            self._by_form[site.form] = self._recorded(site)
        return self._by_form[site.form]

    def _recorded(self, site: Site) -> _Template:
        vals = [node.meta["val"] for node in site.match.inputs.values()]
        outs = [o.meta["val"] if o is not None else None for o in site.outputs]
        numbers = tuple(site.match.numbers.items())
        leading = tuple(site.match.leading.values())
        key = (site.pattern, numbers, leading, *map(layout, vals), *map(layout, outs))
        if key not in self._templates:
            self._templates[key] = self._record(key, site, vals, outs)
        return self._templates[key]

    def _record(self, key: Any, site: Site, vals: list[Any], outs: list[Any]) -> _Template:
        rule, match = site.pattern.rule, site.match
        mode: FakeTensorMode = vals[0].fake_mode
        shapes = _shapes(site, dict(zip(match.inputs, vals, strict=True)))
        order = memory_order(site.pattern, shapes, outs)

        def run(**given: Any) -> tuple[torch.Tensor, ...]:
            tensors = {name: _viewed(given[name], shape) for name, shape in shapes.items()}
            if order is not None:
                open_ = {n: order.applied(t) for n, t in tensors.items() if rule.is_open(n)}
                tensors |= open_
            if rule.layout == "contiguous":
                tensors = {name: _row_major(tensor) for name, tensor in tensors.items()}
            rest = {name: v for name, v in given.items() if name not in rule.inputs}
            out = rule.replacement(**tensors, **rest)
            got = (out,) if isinstance(out, torch.Tensor) else tuple(out)
            if len(got) != len(outs):
                raise PatternError(
                    f"Rule {rule}: the pattern returns {len(outs)} values, "
                    f"the replacement {len(got)}."
                )
            if order is not None:
                got = tuple(map(order.undone, got))
            return tuple(
                g if o is None else _laid_out(_viewed(g, tuple(o.shape)), o)
                for g, o in zip(got, outs, strict=True)
            )

        try:
            recording = self._recordings.get(key)
            if recording is None:
                recording = record(
                    run,
                    dict(zip(match.inputs, _apart(vals, mode), strict=True)),
                    {**match.numbers, **rule.fixed},
                    mode=mode,
                    decompositions=self._decompositions,
                    what=f"The replacement of rule {rule}",
                )
                if not any(map(_is_symbolic, (*vals, *outs))):
                    self._recordings[key] = recording
            declined = None if self._any_kernel else self._kernels_decline(recording, match.device)
            refusal = declined or breaks_contract(rule, recording, outs)
        except Exception as error:  # replacement and predicates are their authors' code
            refusal = _as_reject(error, f"the replacement of {rule} raised")
            recording = Recording([], [], [])
        kernels = tuple(c.target for c in recording.calls if find(c.target) is not None)
        shares = None if refusal is not None else shares_memory(rule, recording, outs)
        return _Template(recording, kernels, refusal, shares)

    @staticmethod
    def _kernels_decline(recording: Recording, device: torch.device) -> Reject | None:
        for call in recording.calls:
            kernel = find(call.target)
            if kernel is None:
                continue
            available = kernel.available(device)
            if not available.ok:
                return Reject("kernel_unavailable", f"{kernel.name}: {available.reason}")
            args = tree_map(lambda a: a.meta["val"] if isinstance(a, Call) else a, call.args)
            reason = kernel.supports(device, *args)
            if reason is not None:
                return Reject("kernel_declined", f"{kernel.name}: {reason}")
        return None

    # -- editing -------------------------------------------------------------------------------

    def _insert(self, site: Site, template: _Template, made: list[Node]) -> list[Node]:
        nodes: dict[Call, Node] = dict(
            zip(template.recording.inputs, site.match.inputs.values(), strict=True)
        )
        mode = site.anchor.meta["val"].fake_mode
        heirs = {
            call: old.meta["val"]
            for call, old in zip(template.recording.outputs, site.outputs, strict=True)
            if old is not None
        }
        trace_meta = {k: site.anchor.meta[k] for k in _ORIGIN if k in site.anchor.meta}
        with self._graph.inserting_before(site.before):

            def argument(value: Any) -> Any:
                if isinstance(value, Call):
                    return nodes[value]
                if isinstance(value, torch.SymInt):
                    return self._size_node(value, site, made)
                if isinstance(value, (tuple, list)):
                    return type(value)(map(argument, value))
                return value

            for call in template.recording.calls:
                if call.op == "placeholder":
                    continue
                args = tuple(map(argument, call.args))
                kwargs = {name: argument(value) for name, value in call.kwargs.items()}
                view = _view_key(call, args, kwargs) if call not in heirs else None
                if (known := self._known_view(view, site.before)) is not None:
                    nodes[call] = known
                    continue
                node = self._graph.call_function(call.target, args, kwargs)
                node.meta.update(trace_meta)
                node.meta["val"] = _own_value(call, node, mode, heirs)
                nodes[call] = node
                made.append(node)
                if view is not None:
                    self._views[view] = node
        return [nodes[c] for c in template.recording.outputs]

    def _known_view(self, key: Any, before: Node) -> Node | None:
        known = None if self._has_writes else self._views.get(key)
        return known if known is not None and not known._erased and known < before else None

    def _size_node(self, value: Any, site: Site, made: list[Node]) -> Any:
        """A node (or a number) with the value of a symbolic size, made from what is there."""
        expr = value.node.expr if isinstance(value, torch.SymInt) else value
        if expr.is_number:
            return int(expr)
        for node in self._nodes_of_size().get(expr, ()):
            if not node._erased and node < site.before:
                return node
        for tensor in site.match.inputs.values():
            for dim, size in enumerate(tensor.meta["val"].shape):
                if isinstance(size, torch.SymInt) and same(size.node.expr, expr):
                    node = self._graph.call_function(aten.sym_size.int, (tensor, dim))
                    node.meta["val"] = size
                    made.append(node)
                    return node
        if isinstance(expr, sympy.Mul):
            factors = [self._size_node(a, site, made) for a in expr.args]
            out = factors[0]
            for factor in factors[1:]:
                node = self._graph.call_function(operator.mul, (out, factor))
                node.meta["val"] = _val(out) * _val(factor)
                made.append(node)
                out = node
            return out
        raise _CannotBuild(f"no value of the graph has the size {expr}.")

    def _nodes_of_size(self) -> dict[sympy.Expr, list[Node]]:
        if self._sizes is None:
            self._sizes = {}
            for node in self._graph.nodes:
                val = node.meta.get("val")
                if isinstance(val, torch.SymInt):
                    self._sizes.setdefault(val.node.expr, []).append(node)
        return self._sizes

    def _redirect(self, site: Site, new_outputs: list[Node]) -> None:
        covered = set(site.covered)
        for node, new in zip(site.outputs, new_outputs, strict=True):
            if node is None:
                continue
            for user in list(node.users):
                if user not in covered:
                    user.replace_input_with(node, new)
        self._erase_dead(covered.union(filter(None, site.outputs)))

    def _erase_dead(self, replaced: set[Node]) -> None:
        """Erase the nodes of a match, their unused parts, and views and splits only it used."""
        parts = {u for n in replaced for u in n.users if u.target is operator.getitem}
        todo = [*replaced, *parts]
        while todo:
            node = todo.pop()
            if node._erased or node.users:
                continue
            if not (node in replaced or node in parts or self._passes_on(node)):
                continue
            todo += node.all_input_nodes
            self._canonical.discard(node)
            self._graph.erase_node(node)

    def _passes_on(self, node: Node) -> bool:
        return self._canonical.is_transparent(node) or is_split(node)


def _view_key(call: Call, args: Any, kwargs: Any) -> Any:
    """What tells a view from others; ``None`` for other calls."""
    op: Any = call.target
    if kwargs or not _shares_memory(op):
        return None
    return op, *(tuple(a) if isinstance(a, (list, tuple)) else a for a in args)


@functools.cache
def _shares_memory(op: Any) -> bool:
    """Whether the schema of an operation lets its result be a view of an operand."""
    arguments = op._schema.arguments if isinstance(op, torch._ops.OpOverload) else ()
    return any(a.alias_info and not a.alias_info.is_write for a in arguments)


class _CannotBuild(Exception):
    pass


def _as_reject(error: Exception, what: str) -> Reject:
    if isinstance(error, PatternError):
        code = "mutation" if isinstance(error, MutationError) else "error"
        return Reject(code, error.what, hint=error.hint)
    return Reject("error", f"{what}: {type(error).__name__}: {error}")


def _is_symbolic(val: torch.Tensor | None) -> bool:
    """Whether a size belongs to one graph, so that what is recorded with it does too."""
    return val is not None and not all(type(s) is int for s in (*val.shape, *val.stride()))


def _is_done(site: Site, template: _Template) -> bool:
    """Whether the match is one kernel call that the replacement would only write again."""
    calls = [n for n in site.covered if n.op == "call_function"]
    return len(calls) == 1 and calls[0].target in template.kernels


def _shapes(site: Site, vals: dict[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    """The shape in which the replacement sees each input.

    Leading sizes written ``...`` are those that most of its values have in the graph. Where inputs
    broadcast they are those in which the graph uses each of them.
    """
    rule, dims = site.pattern.rule, site.match.dims
    known = {size_symbol(name): size for name, size in dims.items()}
    shapes = {
        name: tuple(s if isinstance(s, int) else size_of(s.xreplace(known)) for s in spec.shape)
        for name, spec in rule.specs(site.pattern.dtype).items()
    }
    if site.match.leading:
        used = {name: (*lead, *shapes[name][1:]) for name, lead in site.match.leading.items()}
        return shapes | used
    open_ = [name for name in shapes if rule.is_open(name)]
    if not open_:
        return shapes
    rows = shapes[open_[0]][0]
    leads = [tuple(vals[name].shape[: 1 - len(shapes[name]) or None]) for name in open_]
    given = [lead for lead in leads if same(product([size_of(s) for s in lead]), rows)]
    wanted = [tuple(o.meta["val"].shape) for o in site.outputs if o is not None]

    def fits(lead: Sequence[Any]) -> int:
        """How many values have these leading sizes already, and need no view."""
        return sum(_same_shape(lead, g) for g in given) + sum(
            _same_shape(lead, w[: len(lead)]) for w in wanted
        )

    lead = max(given, key=fits, default=(rows,))
    shapes.update({name: (*lead, *shapes[name][1:]) for name in open_})
    return shapes


def _same_shape(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(same(size_of(x), size_of(y)) for x, y in zip(a, b, strict=True))


def _viewed(tensor: torch.Tensor, shape: tuple[Any, ...]) -> torch.Tensor:
    """``tensor`` in ``shape``, which has the same elements; an unknown size is left open."""
    if _same_shape(tensor.shape, shape):
        return tensor
    sizes = [size_of(s) for s in shape]
    unknown = [i for i, s in enumerate(sizes) if not isinstance(s, int)]
    if len(unknown) <= 1:
        return tensor.reshape([-1 if i in unknown else s for i, s in enumerate(sizes)])
    return tensor.reshape(
        [s if isinstance(s, torch.SymInt) else _sym_int(size_of(s), tensor) for s in shape]
    )


def _sym_int(size: Any, tensor: torch.Tensor) -> Any:
    """A size as an argument for operations on ``tensor``, which has fake data."""
    if isinstance(size, int):
        return size
    env = tensor.fake_mode.shape_env  # type: ignore[attr-defined]
    return env.create_symintnode(size, hint=None)


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy of it where its strides are not those of a contiguous one."""
    if is_row_major(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the strides of ``like``, where a contiguous copy has them."""
    return _row_major(tensor) if is_row_major(like) else tensor


def _own_value(call: Call, node: Node, mode: FakeTensorMode, heirs: dict[Call, Any]) -> Any:
    """A fake value for ``node``: that of the output it replaces, or one that nobody shares.

    Values that are shared with a living node would look like aliases to later passes. A view has
    the memory of what it views.
    """
    if call.target is operator.getitem:
        return node.args[0].meta["val"][call.args[1]]  # type: ignore[union-attr]
    val = call.meta["val"]
    if isinstance(val, torch.Tensor):
        memory = _memory(call, node, val)
        return heirs[call] if memory is None and call in heirs else fake_like(val, mode, memory)
    parts = {
        c.args[1]: v for c, v in heirs.items() if c.target is operator.getitem and c.args[0] is call
    }
    own = [
        parts[i] if i in parts and memory is None else fake_like(v, mode, memory)
        for i, v in enumerate(val)
        for memory in [_memory(call, node, v)]
    ]
    return tuple(own)


def _memory(call: Call, node: Node, val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The operand whose memory ``val`` shares, as recorded and as it is at ``node``."""
    if not _shares_memory(call.target):
        return None
    storage = val.untyped_storage()._cdata
    for there, here in zip(call.args, node.args, strict=False):
        if isinstance(there, Call) and isinstance(here, Node):
            operand = there.meta["val"]
            if isinstance(operand, torch.Tensor) and operand.untyped_storage()._cdata == storage:
                return operand, here.meta["val"]
    return None


def _apart(vals: list[Any], mode: FakeTensorMode) -> list[Any]:
    """``vals`` with a tensor of its own for each: at another site they are different values.

    A recorder tells its inputs by identity, so ``x + x`` would be recorded with one input only.
    """
    return [fake_like(v, mode) if any(v is w for w in vals[:i]) else v for i, v in enumerate(vals)]


def _val(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, Node) else value


def _stable_sort(graph: Graph) -> None:
    """Move nodes behind their inputs, keeping the order of all others."""
    done: set[Node] = set()
    waiting: dict[Node, list[Node]] = {}
    last = None

    def settle(node: Node) -> None:
        nonlocal last
        todo = [node]
        while todo:
            node = todo.pop(0)
            missing = next((s for s in node.all_input_nodes if s not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(node)
                continue
            if last is not None:
                last.append(node)
            last = node
            done.add(node)
            todo = waiting.pop(node, []) + todo

    for node in list(graph.nodes):
        settle(node)
