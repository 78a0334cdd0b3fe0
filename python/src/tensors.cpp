// Tensors as Python hands them over; see tensors.hpp. Place: python, level 6.
// Addresses come as integers, so that no library of tensors is needed to build this.
#include "tensors.hpp"

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace zensync::python {
namespace {

void bind_enums(nb::module_& module) {
  nb::enum_<DType>(module, "DType", "Element types that zensync sums.")
      .value("F32", DType::kF32)
      .value("F64", DType::kF64)
      .value("BF16", DType::kBF16)
      .value("F16", DType::kF16)
      .value("I32", DType::kI32)
      .value("I64", DType::kI64);
  nb::enum_<ReduceOp>(module, "ReduceOp", "SUM, or SUM divided once by n.")
      .value("SUM", ReduceOp::kSum)
      .value("AVG", ReduceOp::kAvg);
  nb::enum_<Layout>(module, "Layout", "How the caller stores a tensor.")
      .value("DENSE", Layout::kDense)
      .value("COO", Layout::kCoo);
}

void bind_spec(nb::module_& module) {
  nb::class_<TensorSpec>(module, "TensorSpec", "rows × row_elems elements of one dtype.")
      .def(
          "__init__",
          [](TensorSpec* self, std::uint64_t rows, std::uint64_t row_elems, DType dtype,
             Layout layout) {
            new (self) TensorSpec{rows, row_elems, dtype, layout};
          },
          nb::arg("rows"), nb::arg("row_elems"), nb::arg("dtype"),
          nb::arg("layout") = Layout::kDense)
      .def_ro("rows", &TensorSpec::rows)
      .def_ro("row_elems", &TensorSpec::row_elems)
      .def_ro("dtype", &TensorSpec::dtype)
      .def_ro("layout", &TensorSpec::layout);
}

}  // namespace

JobSpec to_job(const DenseTensor& tensor, const JobOptions& options) {
  DenseView view;
  view.data = reinterpret_cast<void*>(tensor.data);
  view.rows = tensor.spec.rows;
  view.row_elems = tensor.spec.row_elems;
  view.dtype = tensor.spec.dtype;
  view.ids = reinterpret_cast<const std::int64_t*>(tensor.ids);
  view.ids_count = tensor.ids_count;
  return {options.name, view, options.op, options.allow_dense, options.starts_dense};
}

JobSpec to_job(const CooTensor& tensor, const JobOptions& options) {
  CooView view;
  view.indices = reinterpret_cast<const std::int64_t*>(tensor.indices);
  view.values = reinterpret_cast<const void*>(tensor.values);
  view.entries = tensor.entries;
  view.rows = tensor.spec.rows;
  view.row_elems = tensor.spec.row_elems;
  view.dtype = tensor.spec.dtype;
  return {options.name, view, options.op, options.allow_dense, options.starts_dense};
}

void bind_tensors(nb::module_& module) {
  bind_enums(module);
  bind_spec(module);
  nb::class_<DenseTensor>(module, "DenseTensor", "A contiguous tensor, summed in place.")
      .def(
          "__init__",
          [](DenseTensor* self, std::uintptr_t data, const TensorSpec& spec, std::uintptr_t ids,
             std::uint64_t ids_count) {
            new (self) DenseTensor{data, spec, ids, ids_count};
          },
          nb::arg("data"), nb::arg("spec"), nb::arg("ids") = 0, nb::arg("ids_count") = 0);
  nb::class_<CooTensor>(module, "CooTensor", "Stored rows of a tensor: int64 indices and values.")
      .def(
          "__init__",
          [](CooTensor* self, std::uintptr_t indices, std::uintptr_t values, std::uint64_t entries,
             const TensorSpec& spec) {
            new (self) CooTensor{indices, values, entries, spec};
          },
          nb::arg("indices"), nb::arg("values"), nb::arg("entries"), nb::arg("spec"));
  nb::class_<JobOptions>(module, "JobOptions", "Name, reduction, and where the tensor starts.")
      .def(
          "__init__",
          [](JobOptions* self, std::string name, ReduceOp op, bool allow_dense, bool starts_dense) {
            new (self) JobOptions{std::move(name), op, allow_dense, starts_dense};
          },
          nb::arg("name"), nb::arg("op"), nb::arg("allow_dense") = true,
          nb::arg("starts_dense") = false)
      .def_ro("name", &JobOptions::name)
      .def_ro("op", &JobOptions::op);
}

}  // namespace zensync::python
