"""Stand-ins in torch for what vLLM 0.32 lacks on a CPU to draft beside recurrent states.

vLLM stores the state after each draft in a separate block. Two kernels move the state that counts, and both exist only
for Triton: ``precopy`` moves it before a step to the first block that the step reads; ``postprocess`` moves it after
the step to the end of a block that accepted tokens have reached. Both copy bytes between addresses with ``memmove``.

Two more parts of vLLM's CPU backend are wrong without AMX tiles. Their stand-ins do what the Triton kernels do:

- ``roll_convolution``: vLLM rolls the buffer of a convolution by the maximum number of drafts instead of the request's;
- if only one request of a step does not draft, vLLM passes its blocks with a stride that its own kernel refuses.

Source: ``v1/worker/mamba_utils.py``, ``layers/mamba/ops/causal_conv1d.py`` and ``ops/cpu/gdn_attention.py``, vLLM 0.32.
"""

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

MODULE = "vllm.v1.worker.mamba_utils"

BLOCK_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateTensors:
    """Where the states of every layer are, as vLLM passes it to its kernels: one entry for each tensor of each layer.

    Attributes:
        table_addresses: of the block table of each state group.
        table_stride: entries from one request's row of a block table to the next.
        addresses: of each state tensor.
        strides_bytes: from one block to the next.
        element_bytes: of one number.
        inner_sizes: numbers of one token of a convolution, or of a whole state of another kind.
        conv_widths: tokens that the buffer of a convolution holds; 0 for other kinds.
        groups: the state group, as a position in ``table_addresses``.
    """

    table_addresses: torch.Tensor
    table_stride: int
    addresses: torch.Tensor
    strides_bytes: torch.Tensor
    element_bytes: torch.Tensor
    inner_sizes: torch.Tensor
    conv_widths: torch.Tensor
    groups: torch.Tensor

    def move(self, request: int, source: int, target: int, num_beyond: int) -> None:
        """Copy the state of one request between columns of its block tables, in every layer.

        Args:
            request: its row.
            source: column of the first state of the last step.
            target: column that gets the state.
            num_beyond: tokens of the last step that the state covers beyond the first.
        """
        for state, address in enumerate(self.addresses.tolist()):
            stride, width = int(self.strides_bytes[state]), int(self.conv_widths[state])
            num_bytes = int(self.inner_sizes[state] * self.element_bytes[state])
            to = address + self._block(state, request, target) * stride
            if width:
                # One buffer holds the tokens of the whole step, oldest first.
                start = address + self._block(state, request, source) * stride + num_beyond * num_bytes
                ctypes.memmove(to, start, (width - num_beyond) * num_bytes)
            else:
                # The state after each token of the step is in the next column.
                start = address + self._block(state, request, source + num_beyond) * stride
                ctypes.memmove(to, start, num_bytes)

    def _block(self, state: int, request: int, column: int) -> int:
        entry = request * self.table_stride + column
        address = int(self.table_addresses[int(self.groups[state])]) + entry * BLOCK_ID_BYTES
        return ctypes.c_int32.from_address(address).value


def precopy(*arguments: Any, CONV_STATE_DIM_FIRST: bool, **tuning: Any) -> None:  # noqa: N803 - vLLM's names
    """Stand in for ``precopy_mamba_align_fused_kernel``: bring each state to the first block of the next step."""
    del tuning
    targets, sources, num_beyond, *layout = arguments
    tensors, (_, _, row_mapping, num_requests) = StateTensors(*layout[:8]), layout[8:]
    assert row_mapping is None
    assert not CONV_STATE_DIM_FIRST
    for request in range(num_requests):
        source, target = int(sources[request]), int(targets[request])
        if source >= 0 and source != target:
            tensors.move(request, source, target, int(num_beyond[request]))


def postprocess(
    *arguments: Any,
    block_size: int,
    CONV_STATE_DIM_FIRST: bool,  # noqa: N803 - vLLM's names
    **tuning: Any,
) -> None:
    """Stand in for ``postprocess_mamba_fused_kernel``: keep the state at the end of a block that was reached."""
    del tuning
    num_accepted, sources, num_scheduled, num_computed, num_drafts, *layout = arguments
    tensors, (_, _, num_accepted_out, row_mapping, num_requests) = StateTensors(*layout[:8]), layout[8:]
    assert row_mapping is None
    assert not CONV_STATE_DIM_FIRST
    for request in range(num_requests):
        source = int(sources[request])
        first = int(num_computed[request] + num_scheduled[request] - num_drafts[request])
        end = (first + int(num_accepted[request]) - 1) // block_size * block_size
        if end < first:
            continue
        target = end // block_size - 1
        if source == target:
            num_accepted_out[request] = 1
        if source != target or end != first:
            tensors.move(request, source, target, end - first)


def roll_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, buffer: torch.Tensor, num_accepted: int
) -> torch.Tensor:
    """Convolve one request's tokens of a step, and put them behind the accepted ones of the last step.

    Args:
        x: shape (dim, num_tokens).
        weight: shape (dim, width).
        bias: shape (dim,).
        buffer: shape (dim, width - 1 + most drafts); gets the last ``width - 2`` accepted tokens and ``x``.
        num_accepted: tokens of the last step that count, at least one.

    Returns:
        Shape (dim, num_tokens), float32, before the activation.
    """
    dim, width = weight.shape
    history = buffer[:, num_accepted - 1 : num_accepted + width - 2]
    tokens = torch.cat([history, x.to(buffer.dtype)], dim=-1)
    buffer[:, : tokens.shape[1] - 1] = tokens[:, 1:]
    return F.conv1d(tokens.float().unsqueeze(0), weight.float().unsqueeze(1), bias, groups=dim)[0]


def compute_drafts(
    layer: Any,
    metadata: Any,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    buffers: torch.Tensor,
    ssm_state: torch.Tensor,
    *sizes: int,
) -> Any:
    """Stand in for ``_spec_forward`` of vLLM's CPU backend; the recurrence is vLLM's own kernel."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    del sizes
    num_requests = metadata.num_spec_decodes
    starts = metadata.spec_query_start_loc[: num_requests + 1].to(torch.int32).contiguous()
    blocks = metadata.spec_state_indices_tensor[:num_requests].to(torch.int32).contiguous()
    accepted = metadata.num_accepted_tokens[:num_requests].to(torch.int32).contiguous()
    weight = gdn_attention._unpacked_conv_weight(layer)
    of_requests = zip(
        mixed_qkv.tensor_split(starts[1:-1].tolist()), blocks[:, 0].tolist(), accepted.tolist(), strict=True
    )
    convolved = torch.cat(
        [
            roll_convolution(x.T, weight, layer.conv1d.bias, buffers[block], num).T
            for x, block, num in of_requests
        ]
    )
    activated = F.silu(convolved) if layer.activation == "silu" else convolved
    query, key, value = layer.rearrange_mixed_qkv(activated.to(mixed_qkv.dtype))
    return ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query.squeeze(0),
        k=key.squeeze(0),
        v=value.squeeze(0),
        a=a,
        b=b,
        initial_state_source=ssm_state,
        spec_state_indices=blocks,
        num_accepted_tokens=accepted,
        cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
    )


def register() -> None:
    """Let engines of this process draft with recurrent states, and use the same convolution with and without drafts."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.triton_utils.dispatcher import register_kernels

    compute_others = gdn_attention._spec_aware_nonspec

    def compute_with_dense_blocks(layer: Any, metadata: Any, *arguments: Any) -> None:
        # contiguous() leaves a tensor of one entry as it is, with the stride of a block table's row.
        blocks = metadata.non_spec_state_indices_tensor
        dense = torch.empty(blocks.shape, dtype=blocks.dtype).copy_(blocks)
        compute_others(layer, replace(metadata, non_spec_state_indices_tensor=dense), *arguments)

    def compute_without_drafts(
        layer: Any,
        metadata: Any,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        # vLLM's own convolution without drafts is faster and rounds otherwise, which would hide what drafts change.
        dense = (mixed_qkv.contiguous(), b.contiguous(), a.contiguous())
        states = (gdn_attention._conv_buffer_view(layer), gdn_attention._ssm_state_view(layer))
        compute_with_dense_blocks(layer, metadata, *dense, out, *states, layer.conv1d.weight.size(-1))

    register_kernels(
        {
            f"{MODULE}.precopy_mamba_align_fused_kernel": precopy,
            f"{MODULE}.postprocess_mamba_fused_kernel": postprocess,
        }
    )
    for name, stand_in in {
        "_spec_forward": compute_drafts,
        "_spec_aware_nonspec": compute_with_dense_blocks,
        "_cpu_gdn_attention_nonspec": compute_without_drafts,
    }.items():
        setattr(gdn_attention, name, stand_in)
