"""The kernels as a differentiable function of eager mode; the inputs alone are kept."""

from __future__ import annotations

import torch

from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.ops.autograd import eager_function
from tokenmix_core.ops.buffers import as_rows
from tokenmix_core.ops.fused.gdn_gates.kernels import delta_gates_backward, delta_gates_forward


def _run(a, b, A_log, dt_bias, max_beta):
    g, beta = delta_gates_forward(
        a=as_rows(a), b=as_rows(b), A_log=A_log.contiguous(), dt_bias=dt_bias.contiguous(), max_beta=max_beta
    )
    return g.view(a.shape), beta.view(b.shape)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.max_beta = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(a, b, A_log, dt_bias, dg, dbeta, max_beta):
    da, db, dA_log, ddt_bias = delta_gates_backward(
        a=as_rows(a), b=as_rows(b), A_log=A_log.contiguous(), dt_bias=dt_bias.contiguous(),
        dg=as_rows(dg).contiguous(), dbeta=as_rows(dbeta).contiguous(), max_beta=max_beta,
    )  # fmt: skip
    return da.view(a.shape), db.view(b.shape), dA_log, ddt_bias


_replayed = Replayed(_backward)


def _gradients(ctx, dg, dbeta):
    a, b, *parameters = ctx.saved_tensors
    dg, dbeta = (torch.zeros_like(a, dtype=torch.float32) if x is None else x for x in (dg, dbeta))
    return *_replayed(a, b, *parameters, dg, dbeta, ctx.max_beta), None


gates = eager_function(_run, _save, _gradients)
