// An engine over the native mesh or the torch driver. Place: python, level 6. Owns the engine and
// the rendezvous; every call that may wait releases the GIL. A process forked from the owner has
// none of its threads: there the engine is left alone, its memory kept.
#include "engine.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "job.hpp"
#include "options.hpp"
#include "rendezvous.hpp"
#include "tensors.hpp"
#include "torch_driver.hpp"
#include "zensync/driver/loopback.hpp"
#include "zensync/driver/native_mesh.hpp"

namespace nb = nanobind;

namespace zensync::python {
namespace {

constexpr std::chrono::milliseconds kLastWait{1000};

class EngineHandle {
 public:
  explicit EngineHandle(std::unique_ptr<Engine> engine)
      : engine_(std::move(engine)), owner_(::getpid()) {}
  EngineHandle(const EngineHandle&) = delete;
  EngineHandle& operator=(const EngineHandle&) = delete;
  ~EngineHandle() {
    if (!usable()) {
      static_cast<void>(engine_.release());
      return;
    }
    nb::gil_scoped_release release;
    engine_->close(kLastWait);
    engine_.reset();
  }
  /// In a forked child.
  void forget() const { engine_->close_handles_in_child(); }
  bool usable() const { return owner_ == ::getpid(); }
  Engine& engine() const {
    if (!usable()) throw nb::value_error("the Engine belongs to the process that forked this one");
    return *engine_;
  }

 private:
  std::unique_ptr<Engine> engine_;
  pid_t owner_;
};

NativeMeshOptions mesh_options(Rank rank, int size, const OpenOptions& options) {
  NativeMeshOptions mesh;
  mesh.rank = rank;
  mesh.size = size;
  mesh.name = options.name;
  mesh.address = options.address;
  mesh.settings = options.settings();
  mesh.host_id = options.host_id;
  mesh.timeout = options.timeout;
  mesh.connect_timeout = options.connect_timeout;
  return mesh;
}

struct Opened {
  std::unique_ptr<Driver> driver;
  std::unique_ptr<Control> control;  ///< null where there is one rank
};

// One opening. What Python raises in it goes to its caller, unless all ranks know a better reason.
struct Opening {
  NativeMeshOptions mesh;
  const OpenOptions& options;
  std::shared_ptr<PyRendezvous> rendezvous;
  std::exception_ptr raised;

  Result<std::unique_ptr<Driver>> open_torch(const Control& control);
  Result<Opened> open_all();
  Error explain(const Error& own, Control& control);
};

// `open_link` is given a function that returns the fault as the control connections know it, of use
// until it returns.
Result<std::unique_ptr<Driver>> Opening::open_torch(const Control& control) {
  nb::gil_scoped_acquire gil;
  try {
    const auto fault = nb::cpp_function([&control] { return to_object(control.fault()); });
    return make_torch_driver(mesh.rank, mesh.size, control.topology(), options.open_link(fault));
  } catch (const std::exception& why) {
    raised = std::current_exception();
    return make_error(ErrorKind::kPeerLost,
                      std::string("the torch driver could not be opened: ") + why.what());
  }
}

// Why the data connections could not be had. Torch and its store often notice that a peer is gone
// before the control connections do, which can name it.
Error Opening::explain(const Error& own, Control& control) {
  bool may_be_a_peer = own.kind == ErrorKind::kPeerLost;
  if (raised) {
    nb::gil_scoped_acquire gil;
    try {
      std::rethrow_exception(raised);
    } catch (const nb::python_error& why) {
      may_be_a_peer = why.matches(PyExc_RuntimeError);
    } catch (const std::exception&) {
      may_be_a_peer = false;
    }
  }
  if (may_be_a_peer) static_cast<void>(control.await_fault(kAskLimit));
  const Status fault = control.settle(kSettleLimit);
  if (fault.ok()) return own;
  raised = nullptr;
  return fault.error();
}

Result<Opened> Opening::open_all() {
  Opened opened;
  if (mesh.size == 1) {
    opened.driver = std::move(make_loopback(1).front());
    return opened;
  }
  // First of all the control connections: there ranks find out that their settings differ, the
  // transport among them, before they wait for each other in ways that cannot be ended.
  ControlOptions wanted;
  wanted.mesh = mesh;
  wanted.mesh.name += "/control";
  wanted.beat = options.beat;
  wanted.warn_after = options.warn_after;
  wanted.silent_after = options.silent_after;
  wanted.has_connections = options.control;
  auto control = open_control(wanted, rendezvous);
  raised = rendezvous->raised();
  if (!control.ok()) return control.error();
  opened.control = std::move(control.value());
  const auto watched = make_watched_rendezvous(*rendezvous, *opened.control);
  auto driver =
      options.open_link.is_valid() ? open_torch(*opened.control) : open_native_mesh(mesh, *watched);
  if (!raised) raised = rendezvous->raised();
  if (!driver.ok()) return explain(driver.error(), *opened.control);
  opened.driver = std::move(driver.value());
  if (!options.faults.empty()) {
    FaultPlan plan;
    plan.faults = options.faults;
    opened.driver = make_faulty(std::move(opened.driver), std::move(plan));
  }
  return opened;
}

// A collective call of all ranks: an Engine, or an ErrorInfo. Raises what `rendezvous` and
// `open_link` raise.
nb::object open_engine(int rank, int size, nb::object rendezvous, const nb::dict& options) {
  if (size < 1 || rank < 0 || rank >= size) throw nb::value_error("rank and size do not fit");
  const Result<OpenOptions> parsed = parse_options(options);
  if (!parsed.ok()) return to_object(parsed.error());
  Opening opening{mesh_options(Rank{rank}, size, parsed.value()), parsed.value(),
                  std::make_shared<PyRendezvous>(std::move(rendezvous)), nullptr};
  std::unique_ptr<Engine> engine;
  Status status;
  {
    nb::gil_scoped_release release;
    auto opened = opening.open_all();
    if (opened.ok()) {
      engine = make_engine(std::move(opened.value().driver), parsed.value().engine,
                           std::move(opened.value().control));
    } else {
      status = opened.status();
    }
  }
  if (opening.raised && !engine) std::rethrow_exception(opening.raised);
  if (!status.ok()) return to_object(status);
  return nb::cast(new EngineHandle(std::move(engine)), nb::rv_policy::take_ownership);
}

template <class Tensor>
JobHandle submit(const EngineHandle& self, const Tensor& tensor, const JobOptions& options) {
  Engine& engine = self.engine();
  nb::gil_scoped_release release;
  return JobHandle(engine.submit(to_job(tensor, options)));
}

JobHandle submit_reduce_scatter(const EngineHandle& self, const DenseTensor& tensor,
                                std::uintptr_t output, bool by_rows, const JobOptions& options) {
  Engine& engine = self.engine();
  nb::gil_scoped_release release;
  JobSpec job = to_job(tensor, options);
  job.shard = ShardView{by_rows ? ShardLayout::kRows : ShardLayout::kColumns,
                        reinterpret_cast<void*>(output)};
  return JobHandle(engine.submit(std::move(job)));
}

// (tensor with pointer or 0, options, whether its density is probed)
using AgreeItem = std::tuple<DenseTensor, JobOptions, bool>;

JobHandle agree(const EngineHandle& self, const std::vector<AgreeItem>& items) {
  Engine& engine = self.engine();
  nb::gil_scoped_release release;
  std::vector<DenseItem> wanted;
  wanted.reserve(items.size());
  for (const auto& [tensor, options, probe] : items) {
    wanted.push_back(
        {options.name, tensor.spec, reinterpret_cast<const void*>(tensor.data), options.op, probe});
  }
  return JobHandle(engine.agree(std::move(wanted)));
}

bool would_be_dense(const EngineHandle& self, const std::string& name, const TensorSpec& spec,
                    bool starts_dense) {
  Engine& engine = self.engine();
  nb::gil_scoped_release release;
  return engine.would_be_dense(name, spec, starts_dense);
}

std::pair<std::uint64_t, std::uint64_t> wire_count(const EngineHandle& self) {
  const WireCount count = self.engine().wire_count();
  return {count.sent_bytes, count.received_bytes};
}

void close(const EngineHandle& self, double timeout_s) {
  if (!self.usable()) return;
  nb::gil_scoped_release release;
  self.engine().close(to_milliseconds(timeout_s));
}

void abort(const EngineHandle& self, const ErrorInfo& why) {
  if (!self.usable()) return;
  nb::gil_scoped_release release;
  self.engine().abort(from_info(why));
}

nb::object settled(const EngineHandle& self) {
  Engine& engine = self.engine();
  Status status;
  {
    nb::gil_scoped_release release;
    status = engine.settled();
  }
  return to_object(status);
}

void begin_dense(const EngineHandle& self, const std::string& name) {
  Engine& engine = self.engine();
  nb::gil_scoped_release release;
  engine.begin_dense(name);
}

void end_dense(const EngineHandle& self) {
  Engine& engine = self.engine();
  nb::gil_scoped_release release;
  engine.end_dense();
}

std::vector<std::string> take_notices(const EngineHandle& self) {
  Engine& engine = self.engine();
  nb::gil_scoped_release release;
  return engine.take_notices();
}

}  // namespace

void bind_engine(nb::module_& module) {
  nb::class_<EngineHandle>(module, "Engine", "Jobs of one State.")
      .def("submit_dense", &submit<DenseTensor>, nb::arg("tensor"), nb::arg("options"))
      .def("submit_coo", &submit<CooTensor>, nb::arg("tensor"), nb::arg("options"))
      .def("submit_reduce_scatter", &submit_reduce_scatter, nb::arg("tensor"), nb::arg("output"),
           nb::arg("by_rows"), nb::arg("options"))
      .def("agree", &agree, nb::arg("items"))
      .def("would_be_dense", &would_be_dense, nb::arg("name"), nb::arg("spec"),
           nb::arg("starts_dense"))
      .def_prop_ro("error",
                   [](const EngineHandle& self) { return to_object(self.engine().status()); })
      .def("settled", &settled, "As `error`, once all ranks agree on what they call it.")
      .def_prop_ro("wire_count", &wire_count, "Bytes (sent, received) by exchanges so far.")
      .def("begin_dense", &begin_dense, nb::arg("name"))
      .def("end_dense", &end_dense)
      .def("take_notices", &take_notices)
      .def("forget", &EngineHandle::forget)
      .def("close", &close, nb::arg("timeout_s"))
      .def("abort", &abort, nb::arg("why"));
  module.def("open_engine", &open_engine, nb::arg("rank"), nb::arg("size"), nb::arg("rendezvous"),
             nb::arg("options"));
  module.def(
      "address_towards",
      [](const std::string& host, int port, const std::string& interface_name) -> nb::object {
        Result<std::string> address = address_towards(host, port, interface_name);
        if (!address.ok()) return to_object(address.status());
        return nb::cast(address.value());
      },
      nb::arg("host"), nb::arg("port"), nb::arg("interface_name") = "");
}

}  // namespace zensync::python
