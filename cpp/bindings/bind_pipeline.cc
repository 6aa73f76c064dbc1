#include "bindings.h"

namespace megacore::bindings {

void bind_pipeline(pybind11::module_& module) { static_cast<void>(module); }

}  // namespace megacore::bindings
