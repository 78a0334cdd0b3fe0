"""What the support matrix claims, as data: `scripts/matrix.py` runs the tests that are named here
and writes docs/support_matrix.md from their outcomes.

A test is "file::function" (all its parameters) or "file::function[parameters]", the file without
its folder, tests/python. `works=False`: what zensync refuses, or a limit of torch; then `does` has
the words of the refusal or of the limit, and its tests show them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A symptom or a habit, what zensync does about it, and the tests that show it."""

    name: str
    seen: str
    does: str
    ways: tuple[str, ...]
    tests: tuple[str, ...]
    works: bool = True


PLAIN, TABLES, HOOK, REDUCE = "attach plain", "attach tables + DDP", "hook", "all_reduce"
ALL = (PLAIN, TABLES, HOOK, REDUCE)
ATTACHED = (PLAIN, TABLES)

EQUALS_DDP = "test_attach.py::test_equals_ddp"
IN_FRONT = "test_attach.py::test_tables_in_front_of_ddp"
STOCK = "test_hook.py::test_equals_stock_ddp"
USERS = "test_matrix_users.py::test_users[{}]"
OPTIONS = "test_matrix_options.py::test_options[{}]"


def users(*cells: str) -> tuple[str, ...]:
    return tuple(USERS.format(cell) for cell in cells)


def options(*cells: str) -> tuple[str, ...]:
    return tuple(OPTIONS.format(cell) for cell in cells)


SYMPTOMS = (
    Case(
        "pytorch#80496",
        "an unused sparse table with find_unused_parameters ends backward with an error",
        "works: an empty contribution",
        ATTACHED,
        (EQUALS_DDP, IN_FRONT, *options("unused, attach", "unused, tables")),
    ),
    Case(
        "pytorch#80496, hook",
        "the same, with a hook: DDP fails before the hook is asked",
        'limit of torch: "Expected sparse gradient to be defined."; attach in place of the hook',
        (HOOK,),
        (
            "test_matrix_limits.py::test_ddp_fails_on_such_tables",
            "test_matrix_limits.py::test_attached_tables_do_not_fail",
            "test_attach.py::test_on_a_ddp",
        ),
        works=False,
    ),
    Case(
        "pytorch#17356, Lightning#5355",
        "sparse tables and DDP work over Gloo only",
        "works over every c10d backend, by byte collectives; on GPUs not run (docs/devices.md)",
        ALL,
        (
            "test_torch_wires.py::test_registered_backends",
            "test_torch_sums.py::test_bits_are_those_of_the_native_mesh[3]",
            "test_attach_random.py::test_random_use[torch-2]",
        ),
    ),
    Case(
        "pytorch#22400, nccl#215",
        "no sparse all-reduce on NCCL",
        "works with a fake device back end over Gloo; never run on NCCL (docs/devices.md)",
        ALL,
        (
            "test_device.py::test_sums_and_their_order",
            "test_device_training.py::test_hook_equals_stock_ddp",
            "test_torch_path.py::test_bits_are_those_of_balanced",
        ),
    ),
    Case(
        "pytorch#111422",
        "a torch upgrade broke sparse DDP",
        "works: private names in one file, a test for each; `make test-torch VERSION=…`",
        ALL,
        (
            "test_compat.py::test_the_list_of_private_interfaces_is_whole",
            "test_compat.py::test_private_names_are_in_one_file",
            "test_compat.py::test_end_of_a_backward",
            "test_compat.py::test_what_ddp_ignores_it_leaves_alone",
            "test_compat.py::test_places_in_join",
        ),
    ),
    Case(
        "pytorch#31413",
        "some dtypes come back unreduced, or as another dtype",
        "works: every dtype equals the dense sum, the rest is UnsupportedError",
        (REDUCE,),
        (
            "test_all_reduce.py::test_strided",
            "test_all_reduce.py::test_coo",
            "test_all_reduce.py::test_refused_and_mismatched",
            "test_matrix_limits.py::test_gloo_adds_no_fp16_coo_tensors",
        ),
    ),
    Case(
        "pytorch#112826",
        "CSR gradients are refused",
        "UnsupportedError that names CSR, before anything is sent",
        (PLAIN, REDUCE),
        (*users("CSR"), "test_all_reduce.py::test_refused_and_mismatched"),
        works=False,
    ),
    Case(
        "pytorch#17919, #17941",
        "two backward passes, and entries that pile up under no_sync",
        "works: coalesced while accumulating; a second backward averages what has accumulated",
        ALL,
        (
            "test_attach_training.py::test_accumulation",
            *options(*(f"accumulation, {way}" for way in ("attach", "tables", "hook"))),
            *options("accumulation, all_reduce"),
        ),
    ),
    Case(
        "pytorch#35810, apex#243",
        "GradScaler fails on sparse gradients; fp16 duplicates overflow only when added",
        "works: 16 bits are added in fp32",
        ALL,
        (
            *users("fp16 duplicates"),
            *options(*(f"autocast and GradScaler, {way}" for way in ("attach", "tables", "hook"))),
            *options("autocast and GradScaler, all_reduce"),
        ),
    ),
    Case(
        "pytorch#4829",
        "clipping by norm fails on sparse gradients",
        "works: zensync.clip_grad_norm_ equals the dense norm",
        ALL,
        (
            "test_clip.py::test_equals_the_dense_norm",
            "test_clip.py::test_parts_of_duplicates_do_not_count",
            *options("clip_grad_norm_, attach", "clip_grad_norm_, hook"),
        ),
    ),
    Case(
        "pytorch#4829, by value",
        "clipping by value fails on sparse gradients",
        "limit of torch: clip_grad_value_ fails on COO; clip by norm",
        ALL,
        ("test_matrix_limits.py::test_clipping_by_value_of_torch_fails_on_coo",),
        works=False,
    ),
    Case(
        "pytorch#81162, #36120",
        "coalescing is slow",
        "works: coalesces in C++ (speed: `kernel_coalesce` of `make claims`)",
        (REDUCE,),
        ("test_properties.py::test_coo", *users("duplicates before the wire")),
    ),
    Case(
        "pytorch#101370, transformers#30276, torchrec#3114",
        "gradients are dense-stored though nearly all rows are zero",
        "works: non-zero rows are found, dense comes back (speed: `make claims`)",
        ALL,
        (STOCK, "test_attach_training.py::test_optimisers", "test_all_reduce.py::test_strided"),
    ),
    Case(
        "pytorch#75666, #48670",
        "hook state is lost at restart, or stale when buckets are rebuilt",
        "works: lossless, so nothing to save; counts are kept by parameter name",
        (HOOK, TABLES),
        (*users("names"), *options("buckets rebuilt, hook", "buckets rebuilt, tables")),
    ),
    Case(
        "horovod#228, #430, #433, #459, #679",
        "gathering grows with the workers; always dense gave 30 %",
        "works: sparse or dense per tensor, from counts",
        (HOOK, REDUCE),
        (
            "test_hook.py::test_adapts_both_ways",
            "test_all_reduce.py::test_views_rows_async_and_adapting",
        ),
    ),
    Case(
        "horovod#554, OpenSeq2Seq#244",
        "tied embeddings have more entries than the table has rows, memory grows with nodes",
        "works: the dense plan where it is cheaper",
        (PLAIN, REDUCE),
        (
            EQUALS_DDP,
            "test_all_reduce.py::test_views_rows_async_and_adapting",
            *users("max_bytes"),
        ),
    ),
    Case(
        "horovod#3328, byteps#139",
        "duplicates travel",
        "works: added up before they travel",
        (REDUCE,),
        users("duplicates before the wire"),
    ),
    Case(
        "horovod#1481",
        "16-bit compression skips sparse values",
        "16-bit gradients travel as 16 bits; no option wire_dtype in this version (TypeError)",
        (REDUCE,),
        users("16-bit rows"),
        works=False,
    ),
    Case(
        "DeepSpeed#1416",
        "EmbeddingBag gradients are skipped; a row (+1, −1) vanishes",
        "works: a row is zero only if every element is",
        ALL,
        users("EmbeddingBag", "cancelled rows"),
    ),
    Case(
        "tensorflow#53160, #39545",
        "no gain with more workers",
        "works: values of a rank grow as 2·(1−1/n)",
        (REDUCE,),
        ("test_matrix_users.py::test_bytes_of_a_rank_do_not_grow_with_ranks",),
    ),
    Case(
        "NeMo Automodel PR 3708",
        "a reduce buffer of 9.5 GiB for two embeddings",
        "works: large gradients are sent from where they lie, in chunks (max_bytes)",
        (REDUCE,),
        users("max_bytes"),
    ),
    Case(
        "grace#17",
        "indices and values of a top-k do not fit one future of a hook",
        "works: a hook over zensync.all_reduce, top-k with error feedback",
        (REDUCE,),
        users("top-k"),
    ),
    Case(
        "mxnet#9310",
        "sparse runs cannot be repeated",
        "works: the same bits in new processes",
        (REDUCE,),
        ("test_all_reduce.py::test_same_bits_in_new_processes",),
    ),
    Case(
        "composer PR 1319",
        "ranks that differ in sparse or dense hang until the time-out",
        "attach: works; all_reduce: MismatchError with rank, tensor and what differs",
        (PLAIN, REDUCE),
        (
            "test_attach.py::test_layouts_that_differ",
            "test_all_reduce.py::test_refused_and_mismatched",
            "test_attach_errors.py::test_ranks_that_disagree",
        ),
        works=False,
    ),
    Case(
        "modded-nanogpt PR 219, LoongForge PR 223",
        "owner-sharded exchange of touched rows is written by hand for one model",
        "works: any module, any number of ranks",
        ALL,
        (
            EQUALS_DDP,
            "test_attach_random.py::test_random_use[native-4]",
            "test_all_reduce.py::test_coo",
        ),
    ),
)
