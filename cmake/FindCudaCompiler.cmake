# Decides whether the CUDA module is built; sets MEGACORE_HAS_NVCC to yes or no.
include(CheckLanguage)
set(MEGACORE_HAS_NVCC no)
if(NOT MEGACORE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MEGACORE_CUDA is '${MEGACORE_CUDA}'; it must be AUTO, ON or OFF")
endif()
if(NOT MEGACORE_CUDA STREQUAL "OFF")
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(MEGACORE_HAS_NVCC yes)
  elseif(MEGACORE_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "MEGACORE_CUDA=ON, but no CUDA compiler works here. Put nvcc on PATH or set CUDACXX to it; "
      "or use MEGACORE_CUDA=AUTO (CUDA only when nvcc is found) or OFF.")
  elseif(DEFINED ENV{CUDACXX} OR DEFINED ENV{CUDA_HOME})
    # A silent CPU build here would surprise: the user pointed at a toolkit that does not work.
    message(WARNING
      "CUDACXX or CUDA_HOME is set, but no CUDA compiler works: building without CUDA. "
      "MEGACORE_CUDA=OFF silences this, MEGACORE_CUDA=ON makes it an error.")
  endif()
endif()
