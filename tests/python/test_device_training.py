"""`zensync.hook` and `zensync.attach` on modules of a device (a fake back end): the bodies of their
own tests, whose bits are those of DDP, and the order of events in a backward.
"""

import fake_device
import pytest
import test_attach
import test_attach_training
import test_hook
import torch
import zensync
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel


def body_hook(rank, size):
    runtime = fake_device.install(watches=False)
    test_hook.body_equals_stock(rank, size)
    assert sum(kind == "complete" for _, _, kind, _ in runtime.log) > 20, "by the way of devices"


def test_hook_equals_stock_ddp():
    run_ranks(2, body_hook)


def body_attach(rank, size, bodies):
    runtime = fake_device.install(watches=False)
    for module, body in bodies:
        del runtime.log[:]
        getattr({"attach": test_attach, "training": test_attach_training}[module], body)(rank, size)
        assert sum(kind == "complete" for _, _, kind, _ in runtime.log) > 2, body


BODIES = {
    "equals": [("attach", "body_equals_ddp"), ("attach", "body_nobody_knows")],
    "forms": [
        ("attach", "body_mixed"),
        ("training", "body_accumulates"),
        ("training", "body_come_and_go"),
    ],
}


@pytest.mark.parametrize("bodies", BODIES)
def test_attach_equals_ddp(bodies):
    run_ranks(2, body_attach, BODIES[bodies])


@pytest.mark.slow
def test_attach_in_front_of_ddp_and_in_groups():
    run_ranks(2, body_attach, [("attach", "body_before_ddp")])
    run_ranks(4, body_attach, [("training", "body_groups")])


# ---- the order of events


def body_order(rank, size):
    """What is wrong in a backward with attach, and in one with the hook."""
    runtime = fake_device.install()
    model = test_attach.make_model(1, True)
    with zensync.attach(model) as state:
        run = test_attach.loss_in
        run(model(test_attach.ids_of(rank, 0))).backward()
        del runtime.log[:]
        for step in (1, 2):
            model.zero_grad()
            run(model(test_attach.ids_of(rank, step))).backward()
        # The vector of who has a gradient is not of the device.
        log = [line for line in runtime.log if line[1] != "caller" or line[2] != "collective"]
        attached = fake_device.order_problems(log, marks=True)
        launches = sum(line[2] == "complete" for line in log)
    with zensync.State() as state:
        ddp = DistributedDataParallel(test_hook.make_model(False), bucket_cap_mb=64)
        ddp.register_comm_hook(state, zensync.hook)
        ddp(test_hook.ids_of(rank, 0)).backward()
        del runtime.log[:]
        ddp(test_hook.ids_of(rank, 1)).backward()
        state.flush()
        hooked = fake_device.order_problems(list(runtime.log), torch_waits=True)
    return attached, hooked, launches, ready(runtime.log)


def ready(log):
    return [line for line in log if line[2] == "record"]


def test_order_in_a_backward():
    for attached, hooked, launches, recorded in run_ranks(2, body_order):
        assert not attached
        assert not hooked
        assert launches > 4
        assert recorded


def body_other_streams(rank, size):
    """A parcel is launched on a stream that waits for the streams of all its gradients."""
    runtime = fake_device.install()
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1, bias=False)
    )
    with zensync.attach(model):
        model(torch.ones(2, 4)).sum().backward()
        names = iter(["one", "two"])

        def on_another(parameter):
            runtime._local.stream = fake_device.Stream(next(names))

        for parameter in model.parameters():  # before its gradient is there
            parameter.register_hook(on_another)
        del runtime.log[:]
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        runtime._local.stream = None
        return [line[3] for line in runtime.log if line[2] == "wait" and line[0] == "MainThread"]


def test_gradients_of_several_streams_are_waited_for():
    for waits in run_ranks(1, body_other_streams):
        assert any(stream == "two" and event.endswith("on one") for stream, event in waits), waits
