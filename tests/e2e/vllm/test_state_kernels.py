"""The stand-ins for vLLM's kernels, each against what the kernel's source says, in plain Python.

States are numbers that say what they cover: a state after n tokens is n, and an entry of a convolution's buffer is the
position of its token.
"""

import random
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torch")

import torch
from tests.e2e.vllm.state_kernels import postprocess, precopy, roll_convolution

BLOCK_TOKENS, NUM_DRAFTS, WIDTH = 8, 3, 4
BUFFER_TOKENS = WIDTH - 1 + NUM_DRAFTS
NUM_COLUMNS, NUM_BLOCKS = 12, 64
PADDING = 3
UNTOUCHED = -7.0


def last_column(num_tokens: int) -> int:
    return (num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS - 1


@dataclass
class Device:
    """Two groups, each with a convolution of two channels and a state of three numbers, in pages with padding.

    Attributes:
        pages: of each group, with everything that a block holds.
        tables: of each group, shape (num_requests, NUM_COLUMNS), int32; no block is in two places.
        buffers: of each group, shape (NUM_BLOCKS, BUFFER_TOKENS, 2).
        states: of each group, shape (NUM_BLOCKS, 3).
    """

    num_requests: int
    rng: random.Random
    pages: list[torch.Tensor] = field(init=False)
    tables: list[torch.Tensor] = field(init=False)
    buffers: list[torch.Tensor] = field(init=False)
    states: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.pages = [
            torch.full((NUM_BLOCKS, BUFFER_TOKENS * 2 + 3 + PADDING), UNTOUCHED, dtype=torch.float32)
            for _ in range(2)
        ]
        self.buffers = [
            page[:, : BUFFER_TOKENS * 2].view(NUM_BLOCKS, BUFFER_TOKENS, 2) for page in self.pages
        ]
        self.states = [page[:, BUFFER_TOKENS * 2 : -PADDING] for page in self.pages]
        shape = (self.num_requests, NUM_COLUMNS)
        self.tables = [
            torch.tensor(self.rng.sample(range(NUM_BLOCKS), shape[0] * shape[1]), dtype=torch.int32).reshape(
                shape
            )
            for _ in self.pages
        ]

    def layout(self) -> tuple[object, ...]:
        """Return the arguments that vLLM's kernels take for the layout."""
        tensors = [*self.buffers, *self.states]
        return (
            torch.tensor([table.data_ptr() for table in self.tables]),
            NUM_COLUMNS,
            torch.tensor([tensor.data_ptr() for tensor in tensors]),
            torch.tensor([tensor.stride(0) * 4 for tensor in tensors]),
            torch.tensor([4] * 4),
            torch.tensor([2, 2, 3, 3]),
            torch.tensor([BUFFER_TOKENS] * 2 + [0] * 2),
            torch.tensor([0, 1, 0, 1]),
            torch.zeros(4),
            torch.zeros(4),
        )

    def compute(self, request: int, num_computed: int, num_drafts: int) -> None:
        """Write what a step of one token and its drafts leaves, from the column of its last token on."""
        column = last_column(num_computed + 1 + num_drafts)
        for table, buffer, state in zip(self.tables, self.buffers, self.states, strict=True):
            first = num_computed + 1 - (WIDTH - 1)
            num_tokens = WIDTH - 1 + num_drafts
            buffer[table[request, column], :num_tokens] = torch.arange(first, first + num_tokens).float()[
                :, None
            ]
            for draft in range(num_drafts + 1):
                state[table[request, column + draft]] = num_computed + 1 + draft

    def covers(self, request: int, column: int, num_beyond: int = 0) -> set[int]:
        """Return the tokens that the state in a column covers: one number, unless something is wrong."""
        found: set[int] = set()
        for table, buffer, state in zip(self.tables, self.buffers, self.states, strict=True):
            found |= set(state[table[request, column + num_beyond]].int().tolist())
            history = buffer[table[request, column], num_beyond : num_beyond + WIDTH - 1]
            for channel in history.T.int().tolist():
                assert channel == list(range(channel[0], channel[0] + WIDTH - 1))
                found.add(channel[-1] + 1)
        return found


@pytest.mark.parametrize("seed", range(200))
def test_after_a_step_the_end_of_a_block_and_the_next_step_have_their_states(seed: int) -> None:
    rng = random.Random(seed)
    num_requests = 4
    device = Device(num_requests, rng)
    computed = [rng.randrange(3, 40) for _ in range(num_requests)]
    drafts = [rng.randrange(NUM_DRAFTS + 1) for _ in range(num_requests)]
    accepted = [rng.randrange(1, num + 2) for num in drafts]
    for request in range(num_requests):
        device.compute(request, computed[request], drafts[request])
    columns = [last_column(num + 1 + more) for num, more in zip(computed, drafts, strict=True)]
    scheduled = [num + 1 for num in drafts]
    left = torch.tensor(accepted)

    postprocess(
        *map(torch.tensor, (accepted, columns, scheduled, computed, drafts)),
        *device.layout(),
        left,
        None,
        num_requests,
        block_size=BLOCK_TOKENS,
        CONV_STATE_DIM_FIRST=False,
    )

    new = [num + more for num, more in zip(computed, accepted, strict=True)]
    for request in range(num_requests):
        end = new[request] // BLOCK_TOKENS * BLOCK_TOKENS
        if end > computed[request]:
            assert device.covers(request, end // BLOCK_TOKENS - 1) == {end}
        assert device.covers(request, columns[request], int(left[request]) - 1) == {new[request]}

    more = [rng.randrange(1, NUM_DRAFTS + 2) for _ in range(num_requests)]
    targets = [last_column(num + next_) for num, next_ in zip(new, more, strict=True)]
    precopy(
        *map(torch.tensor, (targets, columns, (left - 1).tolist())),
        *device.layout(),
        None,
        num_requests,
        CONV_STATE_DIM_FIRST=False,
    )

    for request in range(num_requests):
        num_beyond = int(left[request]) - 1 if targets[request] == columns[request] else 0
        assert device.covers(request, targets[request], num_beyond) == {new[request]}
        end = new[request] // BLOCK_TOKENS * BLOCK_TOKENS
        if end > computed[request]:
            assert device.covers(request, end // BLOCK_TOKENS - 1) == {end}
    assert all(bool((page[:, -PADDING:] == UNTOUCHED).all()) for page in device.pages)


def test_a_new_request_has_no_state_to_bring() -> None:
    device = Device(1, random.Random(1))
    before = [state.clone() for state in device.states]

    precopy(*map(torch.tensor, ([2], [-1], [0])), *device.layout(), None, 1, CONV_STATE_DIM_FIRST=False)

    assert all(torch.equal(one, two) for one, two in zip(before, device.states, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_a_convolution_sees_the_accepted_tokens_whatever_was_drafted_between(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dim = 5
    weight, bias = torch.randn(dim, WIDTH, generator=generator), torch.randn(dim, generator=generator)
    tokens = torch.randn(dim, WIDTH - 1, generator=generator)
    buffer = torch.full((dim, BUFFER_TOKENS), UNTOUCHED)
    buffer[:, : WIDTH - 1] = tokens
    num_accepted = 1
    for _ in range(12):
        num_tokens = rng.randrange(1, NUM_DRAFTS + 2)
        step = torch.randn(dim, num_tokens, generator=generator)

        out = roll_convolution(step, weight, bias, buffer, num_accepted)

        sequence = torch.cat([tokens, step], dim=-1)
        for position in range(num_tokens):
            last = tokens.shape[1] + position
            for channel in range(dim):
                terms = [
                    weight[channel, tap] * sequence[channel, last - WIDTH + 1 + tap] for tap in range(WIDTH)
                ]
                assert abs(float(sum(terms) + bias[channel]) - float(out[channel, position])) < 1e-4
        num_accepted = rng.randrange(1, num_tokens + 1)
        tokens = sequence[:, : tokens.shape[1] + num_accepted]
