// Definition of functions on memory.

#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace megacore::bindings {

inline pybind11::arg keyword(const char* name) { return pybind11::arg(name); }
inline const pybind11::arg_v& keyword(const pybind11::arg_v& with_default) { return with_default; }

// Defines a function, in a module or a class, that takes keywords only and runs without the GIL.
// `keywords`: names, or py::arg("name") = default.
template <typename Scope, typename Run, typename... Keywords>
void def_kernel(Scope& scope, const char* name, Run&& run, const Keywords&... keywords) {
  scope.def(name, std::forward<Run>(run), pybind11::kw_only(), keyword(keywords)...,
            pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace megacore::bindings
