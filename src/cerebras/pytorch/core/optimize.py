"""Named passes over the lowered graph, before TorchInductor sees it; each has a one-line contract.

The graph is functional except for the `copy_` of every state update at its end.
"""

import contextlib
import functools
import operator
from pathlib import Path

import torch
from torch import fx

from .passes import eliminate_dead_code
from .tensor import aten

# Up to this many scores (batch * heads * queries * keys) attention is computed from its definition.
ATTENTION_MAX_SCORES = 1 << 22

# Below this much work (multiply-adds) oneDNN's overhead of a call is more than it gains.
ONEDNN_MIN_WORK = 1 << 21


def optimize(module: fx.GraphModule) -> None:
    """Runs `PASSES` in order."""
    for run in PASSES:
        run(module.graph)
        eliminate_dead_code(module.graph)
    module.recompile()


def remove_casts(graph: fx.Graph) -> None:
    """Drops `to` and `_to_copy` that change nothing; the decompositions leave hundreds, each a call at run time."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _CASTS:
            continue
        source, val = node.args[0], node.meta["val"]
        before = source.meta["val"]
        if before.dtype == val.dtype and before.stride() == val.stride() and before.device == val.device:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def merge_common(graph: fx.Graph) -> None:
    """Computes the same expression once; random and mutating operations are left alone."""
    seen: dict = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            continue
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
                continue
            if target.namespace not in ("aten", "prims") or target is aten.bmm.default:
                continue  # attention's scores: computed again in backward rather than kept
        elif target is not operator.getitem:
            continue
        key = (target, _key(node.args), _key(tuple(sorted(node.kwargs.items()))))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def multiply_with_onednn(graph: fx.Graph) -> None:
    """Float32 matrix products go to oneDNN where MKL would leave AVX-512 unused (any CPU that is not Intel's)."""
    if not _mkl_is_slow():
        return
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            continue
        *bias, a, b = node.args
        left, right, out = a.meta["val"], b.meta["val"], node.meta["val"]
        if out.dtype is not torch.float32 or out.device.type != "cpu":
            continue
        (m, k), n = left.shape, right.shape[1]
        if m * k * n < ONEDNN_MIN_WORK or bias and tuple(bias[0].meta["val"].shape) != (n,):
            continue
        with graph.inserting_before(node):
            if not bias and _column_major(left):
                # a weight's gradient: both sides are summed over rows, and one of them has to be turned
                if m > n:
                    product = _linear(graph, _transposed(graph, b), a, None, (n, m))
                    product = _transposed(graph, product)
                else:
                    product = _linear(graph, a, _transposed(graph, b), None, (m, n))
            else:
                product = _linear(graph, a, _transposed(graph, b), bias[0] if bias else None, (m, n))
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def _attend(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """Attention as two batched products and a fused softmax: ATen's flash kernel is slow on short rows."""
    if attn_mask is not None or dropout_p or not _short(q, k, v):
        return NotImplemented
    scores = _scores(q, k, is_causal, scale)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights / total, _flat(v))
    return _heads_inside(out, v), (top + total.log()).view(q.shape[:-1])


def _attend_backward(grad, q, k, v, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    """The gradient of `_attend`: the weights are computed again from the saved logsumexp."""
    if attn_mask is not None or dropout_p or not _short(q, k, v):
        return NotImplemented
    g, flat_q, flat_k = _flat(grad), _flat(q), _flat(k)
    weights = torch.exp(_scores(q, k, is_causal, scale) - logsumexp.reshape(-1, q.shape[-2], 1))
    grad_v = torch.bmm(weights.transpose(1, 2), g)
    grad_weights = torch.bmm(g, _flat(v).transpose(1, 2))
    inner = (g * _flat(out)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - inner) * _scale(q, scale)
    grad_q = torch.bmm(grad_scores, flat_k)
    grad_k = torch.bmm(grad_scores.transpose(1, 2), flat_q)
    return _heads_inside(grad_q, q), _heads_inside(grad_k, k), _heads_inside(grad_v, v)


def _short(q, k, v) -> bool:
    same = q.dtype is k.dtype is v.dtype is torch.float32 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    return same and q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= ATTENTION_MAX_SCORES


def _scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else scale


def _flat(x):
    return x.reshape(-1, *x.shape[-2:])


def _heads_inside(x, like):
    """(batch * heads, length, width) as (batch, heads, length, width), in memory (batch, length, heads, width)."""
    x = x.view(*like.shape[:2], *x.shape[1:])
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _scores(q, k, is_causal, scale):
    scores = torch.bmm(_flat(q), _flat(k).transpose(1, 2)) * _scale(q, scale)
    if not is_causal:
        return scores
    rows = torch.arange(q.shape[-2], device=q.device).unsqueeze(1)
    columns = torch.arange(k.shape[-2], device=q.device)
    return torch.where(rows >= columns, scores, -float("inf"))


# Replace the decompositions (or the lack of one) of TorchInductor; NotImplemented leaves the operation as it is.
DECOMPOSITIONS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attend,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attend_backward,
}


def update_early(graph: fx.Graph) -> None:
    """Puts each state update right after the last value it needs, so that a gradient is freed once it is used.

    A write to a state tensor stays behind every other use of that tensor.
    """
    order = list(graph.nodes)
    position = {n: i for i, n in enumerate(order)}
    updates = set()
    for node in reversed(order):
        if node.op == "call_function" and (
            node.target is aten.copy_.default
            or node.users
            and all(u in updates for u in node.users)
            and _elementwise(node)
        ):
            updates.add(node)
    waiting: dict[fx.Node, int] = {}
    blocks: dict[fx.Node, list[fx.Node]] = {}
    for node in updates:
        needs = {*node.all_input_nodes}
        if node.target is aten.copy_.default:
            needs |= _readers(node.args[0]) - {node}
        waiting[node] = len(needs)
        for n in needs:
            blocks.setdefault(n, []).append(node)
    done: list[fx.Node] = []

    def emit(node):
        stack = [node]
        while stack:
            n = stack.pop()
            done.append(n)
            ready = []
            for update in blocks.get(n, ()):
                waiting[update] -= 1
                if not waiting[update]:
                    ready.append(update)
            stack.extend(sorted(ready, key=position.get, reverse=True))

    for node in order:
        if node not in updates and node.op != "output":
            emit(node)
    assert len(done) == len(order) - 1, "an update waits for a value that no operation makes"
    output = order[-1]
    for node in done:
        output.prepend(node)


def _readers(node: fx.Node) -> set[fx.Node]:
    """Everything that uses a tensor, directly or through views of it."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                if isinstance(user.target, torch._ops.OpOverload) and any(
                    r.alias_info is not None for r in user.target._schema.returns
                ):
                    stack.append(user)
    return found


def _elementwise(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


PASSES = (remove_casts, merge_common, multiply_with_onednn, update_early)

_CASTS = {
    aten.to.dtype,
    aten.to.device,
    aten.to.other,
    aten.to.dtype_layout,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
}


def _key(value):
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_key(v) for v in value))
    if isinstance(value, fx.Node):
        return value
    return (type(value).__name__, str(value))


def _column_major(val: torch.Tensor) -> bool:
    return val.stride(0) == 1 and val.stride(1) != 1


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """node.t(), which undoes an earlier transposition rather than stack on it."""
    if node.target is aten.permute.default and list(node.args[1]) == [1, 0] or node.target is aten.t.default:
        return node.args[0]
    turned = graph.call_function(aten.permute.default, (node, [1, 0]))
    turned.meta["val"] = node.meta["val"].t()
    return turned


def _linear(graph: fx.Graph, x: fx.Node, w: fx.Node, bias: fx.Node | None, shape) -> fx.Node:
    """x @ w.T + bias."""
    node = graph.call_function(torch.ops.mkldnn._linear_pointwise.default, (x, w, bias, "none", [], ""))
    node.meta["val"] = x.meta["val"].new_empty(shape)
    return node


def _lower_linear(x, w, bias, attr, scalars, algorithm, layout=None):
    """TorchInductor's lowering takes only constant weights, packed beforehand; ours change at every step."""
    from torch._inductor.ir import FixedLayout
    from torch._inductor.mkldnn_ir import LinearUnary, _create_output_node

    x, w, size = _operands(x, w)
    inputs, constants = [x, w], [attr, scalars or [-1], algorithm]
    if bias is None:
        constants.insert(0, None)
    else:
        inputs.append(LinearUnary.require_contiguous(LinearUnary.realize_input(bias)))
    made = FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=size)
    return _boxed(_create_output_node(LinearUnary(layout=made, inputs=inputs, constant_args=constants)))


def _lower_linear_binary(x, y, w, bias, attr, layout=None):
    """The same for a product with a sum or product fused."""
    from torch._inductor.ir import FixedLayout
    from torch._inductor.lowering import view
    from torch._inductor.mkldnn_ir import LinearBinary, _create_output_node

    x, w, size = _operands(x, w)
    y = view(y, size) if list(y.get_size()) != size else y
    inputs, constants = [x, LinearBinary.require_contiguous(LinearBinary.realize_input(y)), w], [attr]
    if bias is None:
        constants.insert(0, None)
    else:
        inputs.append(LinearBinary.require_contiguous(LinearBinary.realize_input(bias)))
    made = FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=size)
    return _boxed(_create_output_node(LinearBinary(layout=made, inputs=inputs, constant_args=constants)))


def _operands(x, w):
    """x row-major, w row- or column-major as it lies, and the size of x @ w.T."""
    from torch._inductor.ir import ExternKernel

    x = ExternKernel.require_contiguous(ExternKernel.realize_input(x))
    w = ExternKernel.realize_input(w)
    w.freeze_layout_if_possible() if hasattr(w, "freeze_layout_if_possible") else w.get_layout()
    return x, w, [x.get_size()[0], w.get_size()[0]]


def _boxed(node):
    from torch._inductor.ir import TensorBox

    return node if isinstance(node, TensorBox) else TensorBox.create(node)


@contextlib.contextmanager
def lowerings():
    """While TorchInductor compiles: its lowerings of oneDNN's products replaced by ours."""
    from torch._inductor.fx_passes.post_grad import lazy_init
    from torch._inductor.lowering import lowerings as table

    if not _mkl_is_slow():
        yield
        return
    lazy_init()
    op = torch.ops.mkldnn._linear_pointwise
    ours = {op.default: _lower_linear, op: _lower_linear, op.binary: _lower_linear_binary}
    saved = {k: table.get(k) for k in ours}
    table.update(ours)
    try:
        yield
    finally:
        for k, v in saved.items():
            table.pop(k, None) if v is None else table.__setitem__(k, v)


@functools.cache
def _mkl_is_slow() -> bool:
    """True where ATen's float32 products are MKL's and MKL keeps to AVX2: it asks for Intel's CPUs by name."""
    if not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available():
        return False
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
