"""Plans as text."""

from searchspace.summary import Table, fold, ranges, summary, tables
from tests.plans import small_plan

EXPECTED = """\
Plan
  model                  tiny (0123456789abcdef)
  cluster                cpu:1x4, 4 of 4 devices used
  recipe                 train, float32, adamw, global batch 8
  micro-batches          2
  recomputed             layers.{0-1}
  predicted step         500.00 ms, 16 samples/s
  predicted peak memory  3.0 GiB per device
  lower bound            400.00 ms (gap 20.0 %)
  search                 1.25 s, seed 7, optimal

Stages
  stage  mesh  devices  operators  peak memory  order
  0      tp=2  0-1      2          3.0 GiB      0F0 0F1 0B0 0B1
  1      tp=2  2-3      3          1.0 GiB      1F0 1B0 1F1 1B1

Splits
  operators        count  stage  dimension by axis
  layers.{0-1}.up  2      0      tp:n
  layers.{2-3}.up  2      1      tp:n

Parameters
  parameters          count  stored   gradient  optimizer state
  layers.0.up.weight  1      tp:S(0)  tp:P      tp:S(0)

Predicted time
  part           time
  compute        400.00 ms
  communication  100.00 ms

Runners-up
  plan  step       against the best  peak memory
  dp 4  600.00 ms  +20.0 %           1.0 GiB
  pp 4  450.00 ms  -10.0 %           1.0 TiB      does not fit"""


def test_a_plan_reads_like_this() -> None:
    assert summary(small_plan()) == EXPECTED


def test_what_is_not_there_is_left_out() -> None:
    plan = small_plan(global_batch=None).replace(prediction=None, search=None)
    titles = [table.title for table in tables(plan)]
    assert titles == ["Plan", "Stages", "Splits", "Parameters"]
    assert "predicted" not in summary(plan) and "global batch" not in summary(plan)
    assert "-" in tables(plan)[1].rows[0]  # no peak memory known


def test_long_orders_and_many_recomputed_regions_are_shortened() -> None:
    plan = small_plan()
    transformation = plan.transformation.model_copy(update={"recompute": tuple("abcdefg")})
    lane = plan.order.lanes[0].model_copy(update={"tasks": " ".join(f"0F{i}" for i in range(20))})
    order = plan.order.model_copy(update={"lanes": (lane, plan.order.lanes[1])})
    text = summary(plan.replace(transformation=transformation, order=order))
    assert "a, b, c, d and 3 more" in text
    assert "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 ... (20 tasks)" in text


def test_fold_joins_names_with_equal_values_only() -> None:
    values = {"a.0.w": 1, "a.1.w": 1, "a.2.w": 2, "b": 1, "a.5.w": 1}
    assert fold(values) == {"a.{0-1,5}.w": (3, 1), "a.2.w": (1, 2), "b": (1, 1)}
    assert fold({"a.0.e.0": 1, "a.0.e.1": 1}) == {"a.0.e.{0-1}": (2, 1)}


def test_ranges() -> None:
    assert ranges([3, 1, 0, 2, 8]) == "0-3,8"
    assert ranges([]) == ""


def test_table_without_rows_is_empty() -> None:
    assert Table("Title", ("a", "b"), ()).text() == ""
