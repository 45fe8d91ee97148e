import pytest

from costmodel.memory import (
    ActivationMemory,
    ParameterBytes,
    SegmentUse,
    StorageUse,
    activation_memory,
    parameter_bytes,
    with_allowance,
)

COUNT = 1000


def states(recipe, optimizer="adamw", **more):
    dtype, master = {"float32": ("float32", "float32"), "bf16": ("bfloat16", "float32")}[recipe]
    arguments = {"stored": COUNT, "gradients": [COUNT], "updated": COUNT, "shared": dtype == master} | more
    return parameter_bytes(**arguments, dtype=dtype, master_dtype=master, optimizer=optimizer)


def test_float32_adamw_is_16_bytes_a_parameter():
    assert states("float32") == ParameterBytes(stored=4 * COUNT, gradient=4 * COUNT, master=0, state=8 * COUNT)
    assert states("float32").total == 16 * COUNT


def test_bf16_adamw_is_18_bytes_a_parameter():
    """2 (weight) + 4 (gradient sum) + 4 (master) + 8 (two states): "18 bytes", Megatron-LM with float32 gradients."""
    assert states("bf16").total == (2 + 4 + 4 + 8) * COUNT


@pytest.mark.parametrize(("optimizer", "words"), [("sgd", 0), ("momentum", 1), ("adam", 2)])
def test_state_by_optimizer(optimizer, words):
    assert states("float32", optimizer).total == (4 + 4 + 4 * words) * COUNT


def test_zero_1_splits_the_state_only():
    """ZeRO, arXiv 1910.02054, figure 1: 4 psi (weight, gradient) + 8 psi / n, plus the shard as its own master."""
    found = states("float32", updated=COUNT // 4, shared=False, gradients=[COUNT, COUNT // 4])
    assert found == ParameterBytes(4 * COUNT, 4 * COUNT, 4 * COUNT // 4, 8 * COUNT // 4)


def test_zero_3_splits_everything():
    quarter = COUNT // 4
    found = states("float32", stored=quarter, gradients=[quarter], updated=quarter)
    assert found.total == 16 * quarter


def test_parameter_bytes_add_up():
    assert states("bf16") + states("bf16") == ParameterBytes(*(2 * x for x in (2000, 4000, 4000, 8000)))


# One chain for the tests below: x (10) -> a (20) -> view of a -> b (30), gradients for all but x.
# Buffers are numbered 0: x, 1: a, 2: view, 3: b.


def chain(**more):
    make = StorageUse((0,), (1,), (20,), saved=(0,), wants=(False,))
    make = StorageUse((0,), (1,), (20,), saved=(0, 1), wants=(True,)) if more.get("x_wants") else make
    view = StorageUse((1,), (2,), (20,), view=True, wants=(True,))
    last = StorageUse((2,), (3,), (30,), saved=(2,), wants=(True,))
    return [make, view, last]


def segment(operators, kept=(), region=None, arriving=((0, 10, False),), gathered=0):
    return SegmentUse(tuple(operators), tuple(arriving), gathered, tuple(kept), region)


def test_a_view_shares_the_storage_of_what_it_views():
    memory = activation_memory([segment(chain())])
    assert memory.saved == 10 + 20  # x and a; the view saved by the last operator is a
    assert memory.forward == 10 + 20 + 30


def test_a_storage_that_several_operators_save_is_kept_once():
    twice = [StorageUse((0,), (i,), (5,), saved=(0,), wants=(True,)) for i in (1, 2, 3)]
    assert activation_memory([segment(twice)]).saved == 10


def test_what_is_saved_besides_counts():
    extra = StorageUse((0,), (1,), (20,), saved=(0,), extra=7, wants=(True,))
    assert activation_memory([segment([extra])]).saved == 17


def test_nothing_is_saved_without_backward():
    memory = activation_memory([segment(chain(), kept=(0, 3))], backward=False)
    # x dies after a is made, a after b.
    assert memory == ActivationMemory(0, 50, 0)


def test_the_runtime_keeps_inputs_and_outputs_of_segments():
    assert activation_memory([segment(chain(), kept=(0, 3))]).saved == 10 + 20 + 30


def test_parameters_are_counted_elsewhere():
    product = StorageUse((0, 9), (1,), (20,), saved=(0, 9), wants=(True, True))
    memory = activation_memory([segment([product], kept=(9,))], resident={9: 400})
    assert memory.saved == 10
    # Backward: x is kept, gradients of the output, of x, and of the weight until it is added.
    assert memory.backward == 10 + 20 + 10 + 400


def test_backward_holds_gradients_while_they_flow():
    memory = activation_memory([segment(chain(x_wants=True))])
    # At the last operator: x, a saved; gradients of b (30) and of the storage of a (20).
    at_last = 30 + 30 + 20
    # At the first: a's gradient and x's.  a is still saved.
    assert memory.backward == at_last
    assert memory.backward >= memory.saved


def test_transients_count_where_they_run():
    loss = StorageUse((0,), (1,), (1,), saved=(0,), transient=100, wants=(True,))
    memory = activation_memory([segment([loss])])
    assert memory.forward == 10 + 1 + 100
    assert memory.backward == 10 + 1 + 10 + 100


def layers(count, region=True):
    """``count`` layers of x -> wide (100, saved) -> x' (10); each its own segment."""
    segments = []
    for i in range(count):
        x, wide, out = 2 * i, 2 * i + 1, 2 * i + 2
        operators = [
            StorageUse((x,), (wide,), (100,), saved=(x,), wants=(True,)),
            StorageUse((wide,), (out,), (10,), saved=(wide,), wants=(True,)),
        ]
        arriving = ((0, 10, False),) if i == 0 else ()
        segments.append(segment(operators, kept=(x, out), region=i if region else None, arriving=arriving))
    return segments


def test_recomputation_keeps_only_what_enters_the_regions():
    plain, recomputed = activation_memory(layers(4, region=False)), activation_memory(layers(4))
    assert plain.saved == 5 * 10 + 4 * 100
    assert recomputed.saved == 4 * 10  # inputs of the regions; the last output is made again
    assert recomputed.backward == 40 + (100 + 10) + (10 + 100)  # one region remade, gradients of out and wide
    assert recomputed.forward < plain.forward


def test_conversions_inside_a_region_are_made_again_those_from_outside_stay():
    inside = SegmentUse(
        (StorageUse((5,), (6,), (10,), saved=(5,), wants=(True,)),), ((5, 50, True),), 0, (5, 6), region=0
    )
    first = SegmentUse((StorageUse((0,), (1,), (20,), saved=(0,), wants=(True,)),), ((0, 10, False),), 0, (0, 1), 0)
    assert activation_memory([first, inside]).saved == 10
    outside = SegmentUse(inside.operators, ((5, 50, False),), 0, (5, 6), region=0)
    assert activation_memory([first, outside]).saved == 10 + 50


def test_gathered_parameters_are_there_while_their_segment_runs():
    plain = activation_memory(layers(2))
    gathered = [SegmentUse(s.operators, s.arriving, 1000, s.kept, s.region) for s in layers(2)]
    memory = activation_memory(gathered)
    assert memory.saved == plain.saved
    assert memory.forward == plain.forward + 1000
    assert memory.backward == plain.backward + 1000


def test_the_allowance():
    assert with_allowance(1000) == 1040
    assert with_allowance(0) == 0
