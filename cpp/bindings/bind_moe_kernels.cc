#include "bindings.h"
#include "megacore/moe/grouped_gemm.h"

namespace megacore::bindings {

void bind_moe_kernels(pybind11::module_& module) {
  module.def("is_faster_than_mkl", &moe::is_faster_than_mkl);
}

}  // namespace megacore::bindings
