# SPDX-License-Identifier: Apache-2.0
"""The chunked loss is torch's, its gradients too, and no logits exist for all tokens at once."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from reference_impl.memory.ledger import Ledger
from reference_impl.trained_layers import chunked_cross_entropy

TOKENS, WIDTH, VOCAB = 3 * 7, 16, 50


def inputs(device, dtype=torch.float32):
    head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype, device=device.torch_device)
    hidden = torch.randn(3, 7, WIDTH, dtype=dtype, device=device.torch_device, requires_grad=True)
    labels = torch.randint(VOCAB, (3, 7), device=device.torch_device)
    labels[0, :4] = -100
    return head, hidden, labels


@pytest.mark.parametrize("chunk_tokens", [1, 8, TOKENS, 1000])
def test_loss_and_gradients_are_those_of_torch(device, chunk_tokens):
    head, hidden, labels = inputs(device)
    expected = functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    wanted = torch.autograd.grad(expected * 3, (hidden, head.weight))
    loss = chunked_cross_entropy(head, hidden, labels, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss * 3, (hidden, head.weight)), wanted)


def test_in_bf16_it_is_as_exact_as_torch(device):
    head, hidden, labels = inputs(device, torch.bfloat16)
    exact = functional.cross_entropy(
        (hidden.double() @ head.weight.double().T).flatten(0, 1), labels.flatten()
    )
    wanted = torch.autograd.grad(exact, (hidden, head.weight))
    torches = functional.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten())
    theirs = torch.autograd.grad(torches, (hidden, head.weight))
    ours = torch.autograd.grad(
        chunked_cross_entropy(head, hidden, labels, chunk_tokens=8), (hidden, head.weight)
    )
    for mine, torch_one, right in zip(ours, theirs, wanted, strict=True):
        error, torch_error = ((each.double() - right.double()).norm() for each in (mine, torch_one))
        assert error <= 1.5 * torch_error + 1e-6


def test_labels_that_do_not_count_alone_make_no_loss(device):
    head, hidden, labels = inputs(device)
    loss = chunked_cross_entropy(head, hidden, torch.full_like(labels, -100))
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()


def test_a_frozen_head_and_evaluation(device):
    head, hidden, labels = inputs(device)
    head.requires_grad_(False)
    chunked_cross_entropy(head, hidden, labels).backward()
    assert head.weight.grad is None
    with torch.no_grad():
        assert not chunked_cross_entropy(head, hidden, labels).requires_grad


def test_the_memory_is_that_of_one_chunk(device):
    tokens, vocab = 512, 1024
    head = nn.Linear(WIDTH, vocab, bias=False, device=device.torch_device)
    hidden = torch.randn(tokens, WIDTH, device=device.torch_device, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), device=device.torch_device)
    with Ledger(device, track=[hidden, labels, head.weight]) as ledger:
        before = ledger.device_bytes
        chunked_cross_entropy(head, hidden, labels, chunk_tokens=32).backward()
        peak = ledger.peak_device_bytes - before
    gradients = head.weight.nbytes + hidden.nbytes
    # Logits and the fp32 buffer, and a few numbers a token.
    assert peak <= gradients + 3 * 32 * vocab * 4 + 64 * tokens


def test_what_does_not_fit_is_refused(device):
    head, hidden, labels = inputs(device)
    with pytest.raises(ValueError, match="has a bias"):
        chunked_cross_entropy(nn.Linear(WIDTH, VOCAB), hidden, labels)
    with pytest.raises(ValueError, match="one label a token"):
        chunked_cross_entropy(head, hidden, labels[:, 1:])
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        chunked_cross_entropy(head, hidden, labels, chunk_tokens=0)
    loss = chunked_cross_entropy(head, hidden, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        loss.backward()
