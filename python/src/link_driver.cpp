// A torch driver without an engine, for tests of its contract; see link_driver.hpp. Place: python,
// level 6. Owns the driver and copies of the messages under way (those of the last two exchanges);
// every call releases the GIL, as the engine's thread does not hold it.
#include "link_driver.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "options.hpp"
#include "torch_driver.hpp"

namespace nb = nanobind;

namespace zensync::python {
namespace {

class LinkDriver {
 public:
  LinkDriver(int rank, int size, nb::object link)
      : driver_(make_torch_driver(Rank{rank}, size, flat_topology(size), std::move(link))) {}
  LinkDriver(const LinkDriver&) = delete;
  LinkDriver& operator=(const LinkDriver&) = delete;
  ~LinkDriver() {
    nb::gil_scoped_release release;
    driver_.reset();
  }

  // What came, as list of bytes, or an ErrorInfo.
  nb::object exchange(const std::vector<std::pair<int, nb::bytes>>& sends,
                      const std::vector<std::pair<int, std::uint64_t>>& recvs, double timeout_s) {
    older_ = std::move(newer_);
    newer_.clear();
    Exchange exchange;
    for (const auto& [to, message] : sends) {
      newer_.push_back(std::make_unique<std::string>(message.c_str(), message.size()));
      const auto* data = reinterpret_cast<const std::byte*>(newer_.back()->data());
      exchange.sends.push_back({Rank{to}, {data, newer_.back()->size()}});
    }
    std::vector<Buffer> came(recvs.size());
    for (std::size_t i = 0; i < recvs.size(); ++i) {
      exchange.recvs.push_back({Rank{recvs[i].first}, recvs[i].second, &came[i]});
    }
    Status status;
    {
      nb::gil_scoped_release release;
      status = driver_->exchange(exchange, Clock::now() + to_milliseconds(timeout_s));
    }
    if (!status.ok()) return to_object(status);
    nb::list result;
    for (const Buffer& one : came) {
      result.append(nb::bytes(reinterpret_cast<const char*>(one.data()), one.size()));
    }
    return result;
  }

  nb::object flush(double timeout_s) {
    Status status;
    {
      nb::gil_scoped_release release;
      status = driver_->flush(Clock::now() + to_milliseconds(timeout_s));
    }
    return to_object(status);
  }

  void abort(const ErrorInfo& why) {
    nb::gil_scoped_release release;
    driver_->abort(from_info(why));
  }

  std::vector<std::uint64_t> wire_count() const {
    const WireCount count = driver_->wire_count();
    return {count.sent_bytes, count.received_bytes, count.sent_messages, count.received_messages};
  }

 private:
  // Messages keep their addresses though the vectors move.
  std::vector<std::unique_ptr<std::string>> newer_, older_;
  std::unique_ptr<Driver> driver_;
};

}  // namespace

void bind_link_driver(nb::module_& module) {
  nb::class_<LinkDriver>(module, "LinkDriver", "A torch driver without an engine, for tests.")
      .def(nb::init<int, int, nb::object>(), nb::arg("rank"), nb::arg("size"), nb::arg("link"))
      .def("exchange", &LinkDriver::exchange, nb::arg("sends"), nb::arg("recvs"),
           nb::arg("timeout_s"))
      .def("flush", &LinkDriver::flush, nb::arg("timeout_s"))
      .def("abort", &LinkDriver::abort, nb::arg("why"))
      .def_prop_ro("wire_count", &LinkDriver::wire_count,
                   "Bytes sent and received, messages sent and received.");
}

}  // namespace zensync::python
