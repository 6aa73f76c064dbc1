#include "bindings.h"
#include "megacore/base/vector_clones.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "Native core of megacore. Use the Python packages; this module is private.";
  module.attr("__version__") = MEGACORE_VERSION;
  module.def("vector_bits", &megacore::base::vector_bits);
  megacore::bindings::bind_parallel(module);
  megacore::bindings::bind_pipeline(module);
  megacore::bindings::bind_program(module);
  megacore::bindings::bind_schedule_catalog(module);
  megacore::bindings::bind_buffer(module);
  megacore::bindings::bind_checksum(module);
  megacore::bindings::bind_random(module);
  megacore::bindings::bind_data(module);
  megacore::bindings::bind_moe(module);
  megacore::bindings::bind_peers(module);
  megacore::bindings::bind_clones(module);
  megacore::bindings::bind_graph(module);
}
