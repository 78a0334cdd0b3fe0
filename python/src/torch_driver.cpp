// The torch driver; see torch_driver.hpp. Place: python, level 6.
// Exceptions of the link end here, as errors. `dead_` and the counts have a lock of their own,
// which is never held while the GIL is waited for.
#include "torch_driver.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "zensync/driver/errors.hpp"

namespace nb = nanobind;

namespace zensync::python {
namespace {

constexpr double kLongestSeconds = 1e8;  // what torch's clocks can add to now

double seconds_until(Clock::time_point deadline) {
  const double left = std::chrono::duration<double>(deadline - Clock::now()).count();
  return std::clamp(left, 0.0, kLongestSeconds);
}

// Memory of the core as Python reads and writes it. Also what is only sent is writable: torch warns
// of every tensor over memory that is not.
nb::object view_of(const std::byte* data, std::size_t size_bytes) {
  static char nothing = 0;
  auto* start = reinterpret_cast<char*>(const_cast<std::byte*>(data));
  if (size_bytes == 0) start = &nothing;
  nb::object view =
      nb::steal(PyMemoryView_FromMemory(start, static_cast<Py_ssize_t>(size_bytes), PyBUF_WRITE));
  if (!view.is_valid()) nb::raise_python_error();
  return view;
}

// Where one awaited message goes; of use during one exchange.
struct RecvSlot {
  Rank self;
  Recv recv;

  // The Buffer's memory for a message of `size_bytes`, or why it is not taken.
  nb::object allocate(std::uint64_t size_bytes) const {
    if (recv.into == nullptr) throw nb::value_error("the exchange of this RecvSlot has ended");
    if (size_bytes > recv.capacity_bytes) {
      return to_object(driver::too_long_error(self, recv.from, size_bytes, recv.capacity_bytes));
    }
    recv.into->resize_discard(size_bytes);
    return view_of(recv.into->data(), size_bytes);
  }
};

// The slots of one exchange; the link may keep the Python objects, but not what they lead to.
class Slots {
 public:
  Slots() = default;
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;
  ~Slots() {
    for (nb::handle slot : list) nb::inst_ptr<RecvSlot>(slot)->recv.into = nullptr;
  }
  nb::list list;
};

class TorchDriver final : public Driver {
 public:
  TorchDriver(Rank rank, int size, Topology topology, nb::object link)
      : rank_(rank), size_(size), topology_(std::move(topology)), link_(std::move(link)) {}
  TorchDriver(const TorchDriver&) = delete;
  TorchDriver& operator=(const TorchDriver&) = delete;
  ~TorchDriver() override {
    if (!Py_IsInitialized()) {
      static_cast<void>(link_.release());  // the interpreter is gone, and the object with it
      return;
    }
    nb::gil_scoped_acquire gil;
    drop("close");
    link_.reset();
  }

  Rank rank() const override { return rank_; }
  int size() const override { return size_; }
  const Topology& topology() const override { return topology_; }
  std::string name() const override { return "torch"; }
  WireCount wire_count() const override {
    const std::lock_guard lock(mutex_);
    return count_;
  }

  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    if (Status dead = status(); !dead.ok()) return dead;
    if (Status bad = driver::check_exchange(exchange, rank_, size_); !bad.ok()) {
      nb::gil_scoped_acquire gil;
      drop("abort");
      return settle(bad);
    }
    Status result = call([&] {
      Slots slots;
      nb::list sends;
      for (const Send& send : exchange.sends) {
        sends.append(
            nb::make_tuple(send.to.value, view_of(send.message.data(), send.message.size())));
      }
      for (const Recv& recv : exchange.recvs) slots.list.append(nb::cast(RecvSlot{rank_, recv}));
      return link_.attr("exchange")(sends, slots.list, seconds_until(deadline));
    });
    if (result.ok()) count(exchange);
    return settle(std::move(result));
  }

  Status flush(Clock::time_point deadline) override {
    if (Status dead = status(); !dead.ok()) return dead;
    return settle(call([&] { return link_.attr("flush")(seconds_until(deadline)); }));
  }

  void abort(const Error& why) override {
    {
      const std::lock_guard lock(mutex_);
      if (dead_) return;  // the connections are dropped, or about to be
      dead_ = driver::reported_by(rank_, why);
    }
    nb::gil_scoped_acquire gil;
    drop("abort");
  }

 private:
  Status status() const {
    const std::lock_guard lock(mutex_);
    if (dead_) return *dead_;
    return {};
  }

  // The first error is final: that of an abort, if one came meanwhile.
  Status settle(Status result) {
    const std::lock_guard lock(mutex_);
    if (!dead_ && !result.ok()) dead_ = result.error();
    if (dead_) return *dead_;
    return result;
  }

  // Runs a call to the link that gives None or an ErrorInfo. What it raises drops the connections.
  template <class Call>
  Status call(Call&& make) {
    nb::gil_scoped_acquire gil;
    Error error;
    try {
      const nb::object failure = make();
      if (failure.is_none()) return {};
      return from_info(nb::cast<ErrorInfo>(failure));
    } catch (const nb::python_error& why) {
      const bool memory = why.matches(PyExc_MemoryError);
      error = memory ? make_error(ErrorKind::kCapacity, "no memory for a message")
                     : make_error(ErrorKind::kInternal,
                                  std::string("the torch driver failed: ") + why.what());
    } catch (const std::exception& why) {
      error =
          make_error(ErrorKind::kInternal, std::string("the torch driver failed: ") + why.what());
    }
    error.rank = error.culprit = rank_;
    drop("abort");
    return error;
  }

  // link.abort() or link.close(); needs the GIL. What it raises is of no use: the driver is dead.
  void drop(const char* how) {
    try {
      link_.attr(how)();
    } catch (const std::exception&) {
      return;
    }
  }

  void count(const Exchange& exchange) {
    const std::lock_guard lock(mutex_);
    for (const Send& send : exchange.sends) {
      ++count_.sent_messages;
      count_.sent_bytes += kFramePrefixBytes + send.message.size();
    }
    for (const Recv& recv : exchange.recvs) {
      ++count_.received_messages;
      count_.received_bytes += kFramePrefixBytes + recv.into->size();
    }
  }

  const Rank rank_;
  const int size_;
  const Topology topology_;
  nb::object link_;
  mutable std::mutex mutex_;  // guards what follows
  std::optional<Error> dead_;
  WireCount count_;
};

ErrorInfo deadline_info(int rank, const std::vector<int>& delivering,
                        const std::vector<int>& taking) {
  return to_info(driver::deadline_error(Rank{rank}, delivering, taking));
}

ErrorInfo lost_info(int rank, int peer, const std::string& how) {
  return to_info(driver::lost_error(Rank{rank}, Rank{peer}, how));
}

}  // namespace

std::unique_ptr<Driver> make_torch_driver(Rank rank, int size, Topology topology, nb::object link) {
  return std::make_unique<TorchDriver>(rank, size, std::move(topology), std::move(link));
}

void bind_torch_driver(nb::module_& module) {
  nb::class_<RecvSlot>(module, "RecvSlot", "Where one awaited message of an exchange goes.")
      .def_prop_ro("peer", [](const RecvSlot& self) { return self.recv.from.value; })
      .def_prop_ro("capacity_bytes", [](const RecvSlot& self) { return self.recv.capacity_bytes; })
      .def("allocate", &RecvSlot::allocate, nb::arg("size_bytes"));
  module.def("deadline_info", &deadline_info, nb::arg("rank"), nb::arg("delivering"),
             nb::arg("taking"));
  module.def("lost_info", &lost_info, nb::arg("rank"), nb::arg("peer"), nb::arg("how"));
}

}  // namespace zensync::python
