"""`zensync.clip_grad_norm_` on dense-stored and COO gradients, against torch's on dense ones.

A COO gradient has duplicates, whose parts must not count by themselves.
"""

import math

import pytest
import torch
import zensync


def make(sparse, scale=1.0):
    """Two parameters; the first one's gradient has row 3 twice."""
    table = torch.nn.Parameter(torch.zeros(50, 4))
    layer = torch.nn.Parameter(torch.zeros(7))
    generator = torch.Generator().manual_seed(3)
    rows = torch.tensor([[3, 9, 3]])
    values = torch.randn(3, 4, generator=generator) * scale
    gradient = torch.sparse_coo_tensor(rows, values, (50, 4), check_invariants=False)
    table.grad = gradient if sparse else gradient.to_dense()
    layer.grad = torch.randn(7, generator=generator) * scale
    return [table, layer, torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_equals_the_dense_norm(norm_type, max_norm):
    wanted, ours, dense = make(False), make(True), make(False)
    total = torch.nn.utils.clip_grad_norm_(wanted, max_norm, norm_type)
    assert torch.allclose(zensync.clip_grad_norm_(ours, max_norm, norm_type), total, rtol=1e-6)
    assert torch.equal(zensync.clip_grad_norm_(dense, max_norm, norm_type), total)
    for mine, other, theirs in zip(ours[:2], dense[:2], wanted[:2], strict=True):
        assert torch.allclose(mine.grad.to_dense(), theirs.grad, rtol=1e-6)
        assert torch.equal(other.grad, theirs.grad)
    assert ours[0].grad.is_coalesced()


def test_parts_of_duplicates_do_not_count():
    """The control: the norm over uncoalesced entries is another."""
    one = make(True)[:1]
    entries = torch.linalg.vector_norm(one[0].grad._values())
    assert not torch.allclose(zensync.clip_grad_norm_(one, 1e9), entries)


def test_what_is_not_finite():
    for sparse in (False, True):
        with pytest.raises(zensync.Error, match="norm"):
            zensync.clip_grad_norm_(make(sparse, math.inf), 1.0, error_if_nonfinite=True)
        assert not torch.isfinite(zensync.clip_grad_norm_(make(sparse, math.nan), 1.0))


def test_nothing_to_clip():
    assert zensync.clip_grad_norm_([torch.nn.Parameter(torch.zeros(3))], 1.0) == 0.0
    empty = torch.nn.Parameter(torch.zeros(5, 2))
    empty.grad = torch.sparse_coo_tensor(
        torch.zeros((1, 0), dtype=torch.int64), torch.zeros(0, 2), (5, 2), check_invariants=False
    )
    assert zensync.clip_grad_norm_(empty, 1.0) == 0.0
    csr = torch.nn.Parameter(torch.eye(3).to_sparse_csr())
    csr.grad = torch.eye(3).to_sparse_csr()
    with pytest.raises(zensync.UnsupportedError, match="csr"):
        zensync.clip_grad_norm_(csr, 1.0)
