"""Tables of conversion costs against the cheapest paths that are executed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autoplan.search.conversions import Conversions
from costmodel.cluster import Cluster
from costmodel.collectives import CommunicationPrices
from searchspace.conversion import cheapest_path
from searchspace.layout import P, R, Split
from searchspace.mesh import Mesh

PRICES = CommunicationPrices(Cluster.parse("h100:2x4"))


@pytest.mark.parametrize("shape", [(64, 32, 96), (7, 9, 10)])
@pytest.mark.parametrize("axes", [(("dp", 2), ("tp", 4)), (("dp", 4),)])
def test_tables_are_the_cheapest_paths_but_for_single_transfers(axes, shape):
    mesh = Mesh(axes, tuple(range(8 if len(axes) == 2 else 4)))
    layouts = list(itertools.product((R, P, Split(0), Split(1)), repeat=len(axes)))
    layouts = [lay for lay in layouts if lay != (Split(0), Split(0)) or shape[0] >= 8]
    layouts = [lay for lay in layouts if lay != (Split(1), Split(1)) or shape[1] >= 8]
    table = Conversions(mesh, PRICES).table(shape, 4, layouts, layouts)
    equal = 0
    for (i, a), (j, b) in itertools.product(enumerate(layouts), repeat=2):
        path = cheapest_path(shape, 4, (mesh, a), (mesh, b), PRICES)
        assert table[i, j] >= path.seconds - 1e-12
        if all(move.kind != "send_receive" for move in path.moves):
            assert table[i, j] == pytest.approx(path.seconds)
            equal += 1
    assert equal > 0.7 * len(layouts) ** 2
    assert not np.diagonal(table).any()


def test_layouts_that_cut_alike_convert_for_nothing():
    mesh = Mesh.line(4, "tp")
    table = Conversions(mesh, PRICES).table((64, 512), 2, [(Split(1, 128),)], [(Split(1),)])
    assert table.tolist() == [[0.0]]
