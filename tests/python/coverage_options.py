"""The second half of what the support matrix claims: habits of torch, and options × ways.

Data for `scripts/matrix.py`, as coverage_cases.py. An entry of the table of options is a tuple of
tests, `Limit` (a refusal or a limit of torch, with its tests) or a text: why there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

from coverage_cases import ALL, ATTACHED, HOOK, IN_FRONT, PLAIN, REDUCE, STOCK, TABLES, Case
from coverage_cases import options as cells

JOIN = "test_matrix_join.py::test_join[{}]"
GROUPS = "test_matrix_groups.py::test_groups[{}]"
COMPILE = "test_matrix_compile.py::test_compile[{}]"
ANEW = ("test_matrix_groups.py::test_a_group_made_anew",)
FSDP = ("test_attach_errors.py::test_what_is_refused",)

HABITS = (
    Case(
        "sparse buckets of a hook",
        "a sparse=True table is a bucket of its own, uncoalesced, undivided; the result is COO",
        "works",
        (HOOK,),
        (STOCK, *cells("buckets rebuilt, hook")),
    ),
    Case(
        "tables that DDP does not know",
        "F.embedding(sparse=True), tied and unused tables fail in DDP",
        "works: taken away from DDP",
        (TABLES,),
        (
            IN_FRONT,
            "test_matrix_limits.py::test_attached_tables_do_not_fail",
            "test_compat.py::test_what_ddp_ignores_it_leaves_alone",
        ),
    ),
    Case(
        "functional and tied sparse tables, hook",
        "DDP fails on them before the hook is asked",
        "limit of torch; attach in place of the hook",
        (HOOK,),
        ("test_matrix_limits.py::test_ddp_fails_on_such_tables",),
        works=False,
    ),
    Case(
        "sparse gradients that share memory",
        "two sparse=True tables whose rows are added: stock DDP halves one gradient (found here)",
        "works",
        ALL,
        (
            "test_matrix_limits.py::test_ddp_halves_sparse_gradients_that_share_memory",
            *cells(*(f"SGD on COO, {way}" for way in ("attach", "tables", "hook", "all_reduce"))),
        ),
    ),
    Case(
        "FSDP2, its custom reduce-scatter and column shards",
        "a push-only synchronisation would fit",
        "works on CPUs: units with tables by non-zeros, `zensync.by_columns` for equal shares",
        (PLAIN,),
        (
            "test_fsdp.py::test_gradients_and_losses_are_those_of_stock",
            "test_fsdp.py::test_with_tensor_parallelism",
            "test_fsdp.py::test_accumulation_sends_once",
            "test_fsdp.py::test_what_is_refused",
        ),
    ),
    Case(
        "FSDP1 and DTensor",
        "they fail with sparse layouts",
        "UnsupportedError that names FSDP1, DTensor",
        (PLAIN,),
        FSDP,
        works=False,
    ),
    Case(
        "Gloo's sparse all-reduce",
        "gathers everything everywhere",
        "works: rows travel to owners, or in pairs, or are gathered, whichever is least",
        (REDUCE,),
        (
            "test_matrix_users.py::test_bytes_of_a_rank_do_not_grow_with_ranks",
            "test_all_reduce.py::test_coo",
        ),
    ),
    Case(
        "optimisers",
        "SGD, Adagrad, SparseAdam take COO gradients; Adam, AdamW, RMSprop, fused, decay do not",
        "limit of torch: dense-stored gradients for those, which are sent sparse all the same",
        ATTACHED,
        (
            "test_attach_training.py::test_optimisers",
            "test_matrix_limits.py::test_optimisers_that_take_no_coo_gradients",
        ),
        works=False,
    ),
    Case(
        "parameters that DDP ignores",
        "are not broadcast by it; hooks fire in an order that differs between ranks",
        "works: rank 0's values; one order of launching",
        ATTACHED,
        (IN_FRONT, "test_attach.py::test_a_rank_without_gradients_takes_part"),
    ),
    Case(
        "futures of a hook",
        "one that never ends hangs, a hook that raises leaves DDP unusable",
        "works: errors come by the future, in words, state.last_error keeps them",
        (HOOK,),
        ("test_hook.py::test_three_ranks_and_errors",),
    ),
    Case(
        "views of gradients are aligned to the element only",
        "kernels must not assume more",
        "works",
        (REDUCE, HOOK),
        ("test_all_reduce.py::test_views_rows_async_and_adapting", STOCK),
    ),
    Case(
        "Join after exactly one step",
        "torch's own fails on a sparse=True table in a DDP",
        "limit of torch with DDP and hook; attach plain and tables work",
        ALL,
        (
            "test_matrix_join.py::test_torch_itself_fails_on_sparse_tables_after_one_step",
            JOIN.format("attach sparse"),
            JOIN.format("tables sparse"),
        ),
        works=False,
    ),
)

WAYS = {PLAIN: "attach", TABLES: "tables", HOOK: "hook", REDUCE: "all_reduce"}
NO_DDP = "no DDP"
BY_HAND = "the program's own"


@dataclass(frozen=True)
class Limit:
    """A stated refusal, or a limit of torch."""

    words: str
    tests: tuple[str, ...]


Entry = tuple[str, ...] | Limit | str


def in_ways(template: str, name: str, **others: Entry) -> dict[str, Entry]:
    """One test for each way, but for those that are given."""
    return {
        way: others.get(word, (template.format(f"{name}, {word}"),)) for way, word in WAYS.items()
    }


OPTION = "test_matrix_options.py::test_options[{}]"
FAILS = ("test_matrix_limits.py::test_ddp_fails_on_such_tables",)

OPTIONS: dict[str, dict[str, Entry]] = {
    "unused tables, find_unused_parameters": in_ways(OPTION, "unused"),
    "the same, sparse=True with the hook": {HOOK: Limit("DDP fails", FAILS)},
    "static_graph": in_ways(OPTION, "static_graph", attach=NO_DDP, all_reduce=NO_DDP),
    "gradient_as_bucket_view": in_ways(
        OPTION, "gradient_as_bucket_view", attach=NO_DDP, all_reduce=NO_DDP
    ),
    "buckets rebuilt, bucket_cap_mb": in_ways(
        OPTION, "buckets rebuilt", attach=NO_DDP, all_reduce=NO_DDP
    ),
    "checkpointing, use_reentrant=False": in_ways(OPTION, "checkpointing"),
    "checkpointing, re-entrant": {
        PLAIN: Limit("UnsupportedError", ("test_attach_errors.py::test_errors_in_backward",))
    },
    "Join": {
        PLAIN: tuple(JOIN.format(f"attach {kind}") for kind in ("sparse", "dense", "after")),
        TABLES: tuple(JOIN.format(f"tables {kind}") for kind in ("sparse", "dense", "after")),
        HOOK: (JOIN.format("hook dense"),),
        REDUCE: BY_HAND,
    },
    "Join, sparse=True after one step with the hook": {
        HOOK: Limit(
            "torch fails",
            ("test_matrix_join.py::test_torch_itself_fails_on_sparse_tables_after_one_step",),
        )
    },
    "Join, divided by those that are left": {PLAIN: (JOIN.format("attach active"),)},
    "Join, with accumulation": {PLAIN: (JOIN.format("attach accumulation"),)},
    "Join, throw_on_early_termination": {PLAIN: (JOIN.format("attach throws"),)},
    "Join, in another order or with two States": {
        PLAIN: Limit("UnsupportedError", (JOIN.format("refused"),)),
        TABLES: Limit("UnsupportedError", (JOIN.format("refused"),)),
    },
    "torch.compile, aot_eager": in_ways(COMPILE, "aot_eager"),
    "torch.compile, then attach": {PLAIN: (COMPILE.format("compiled first, attach"),)},
    "torch.compile, inductor with a break": in_ways(
        COMPILE, "inductor with a break", all_reduce=BY_HAND
    ),
    "sub-groups": in_ways(GROUPS, "sub-groups"),
    "groups of a DeviceMesh": in_ways(GROUPS, "DeviceMesh"),
    "several models and States": in_ways(OPTION, "several States"),
    "parameters frozen in the middle": in_ways(OPTION, "frozen", all_reduce=BY_HAND),
    "parameters added in the middle": in_ways(
        OPTION,
        "added",
        tables="DDP's set is fixed",
        hook="DDP's set is fixed",
        all_reduce=BY_HAND,
    ),
    "process group made anew": dict.fromkeys(WAYS, ANEW),
    "bfloat16 parameters": in_ways(OPTION, "bfloat16"),
    "float16 parameters": in_ways(OPTION, "float16"),
    "autocast and GradScaler": in_ways(OPTION, "autocast and GradScaler"),
    "accumulation": in_ways(OPTION, "accumulation"),
    **{
        f"{name} on COO gradients": in_ways(OPTION, f"{name} on COO")
        for name in ("SGD", "Adagrad", "SparseAdam")
    },
    **{
        f"{name} on dense-stored gradients": in_ways(OPTION, f"{name} on dense-stored")
        for name in ("Adam", "AdamW", "fused AdamW")
    },
    "clip_grad_norm_": in_ways(OPTION, "clip_grad_norm_"),
}
