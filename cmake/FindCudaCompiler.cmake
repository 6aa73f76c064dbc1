# Decides whether the CUDA module is built and for which architectures: sets MEGACORE_HAS_NVCC to yes or no
# and, where none are named, MEGACORE_CUDA_ARCHS. Most machines that compile this have no GPU to run device code on, and
# it is most of the compile time, so AUTO builds it only where a GPU is found or architectures are named. ON adds 90a and
# 100a to those of the GPUs at hand: what it builds may run on another machine.
include(CheckLanguage)
set(MEGACORE_HAS_NVCC no)
if(NOT MEGACORE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MEGACORE_CUDA must be AUTO, ON or OFF, got '${MEGACORE_CUDA}'")
endif()

# Compute capabilities of the GPUs at hand, "9.0" as "90a": from 90 on, an architecture has instructions
# of its own (wgmma, TMA) that the plain target leaves out.
function(megacore_local_archs result)
  set(archs "")
  if(EXISTS /dev/nvidia0)
    set(archs "90a;100a")  # a GPU, of unknown architecture unless nvidia-smi names it
  endif()
  find_program(MEGACORE_NVIDIA_SMI nvidia-smi NO_CACHE)
  if(MEGACORE_NVIDIA_SMI)
    execute_process(
      COMMAND "${MEGACORE_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE status TIMEOUT 30)
    if(status EQUAL 0)
      set(archs "")
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${text}")
      foreach(capability IN LISTS capabilities)
        string(REPLACE "." "" arch "${capability}")
        if(arch GREATER_EQUAL 90)
          string(APPEND arch "a")
        endif()
        if(NOT arch LESS 80)
          list(APPEND archs "${arch}")
        endif()
      endforeach()
      list(REMOVE_DUPLICATES archs)
    endif()
  endif()
  set(${result} "${archs}" PARENT_SCOPE)
endfunction()

# Removes architectures that the compiler does not know: a GPU may be newer than the toolkit.
function(megacore_drop_unknown_archs archs)
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
  set(kept "")
  foreach(arch IN LISTS ${archs})
    string(REGEX REPLACE "[af]$" "" number "${arch}")
    if("${known}" MATCHES "compute_${number}([^0-9]|$)")
      list(APPEND kept "${arch}")
    else()
      message(NOTICE
        "No CUDA kernels for sm_${arch}: ${CMAKE_CUDA_COMPILER} does not know it. A newer toolkit does; until then operations "
        "there take torch's kernels.")
    endif()
  endforeach()
  set(${archs} "${kept}" PARENT_SCOPE)
endfunction()

string(REGEX REPLACE "[, ]+" ";" MEGACORE_CUDA_ARCHS "${MEGACORE_CUDA_ARCHS}")
list(REMOVE_ITEM MEGACORE_CUDA_ARCHS "")
set(archs_are_found NO)  # named ones that the compiler does not know are an error
if(MEGACORE_CUDA_ARCHS STREQUAL "" AND DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(MEGACORE_CUDA_ARCHS "${CMAKE_CUDA_ARCHITECTURES}")
endif()
set(wanted "${MEGACORE_CUDA}")
if(wanted STREQUAL "AUTO")
  if(MEGACORE_CUDA_ARCHS STREQUAL "")
    megacore_local_archs(MEGACORE_CUDA_ARCHS)
    if(NOT MEGACORE_CUDA_ARCHS STREQUAL "")
      set(archs_are_found YES)
      message(STATUS "CUDA kernels wanted for ${MEGACORE_CUDA_ARCHS}: the GPUs of this machine")
    endif()
  endif()
  if(MEGACORE_CUDA_ARCHS STREQUAL "")
    set(wanted "OFF")
    message(STATUS
      "CUDA kernels left out: no GPU of compute capability 8.0 or newer on this machine. MEGACORE_CUDA=ON "
      "pip install . builds them for sm_90a and sm_100a, MEGACORE_CUDA_ARCHS=90a for one architecture")
  endif()
endif()
if(wanted STREQUAL "ON" AND MEGACORE_CUDA_ARCHS STREQUAL "")
  megacore_local_archs(MEGACORE_CUDA_ARCHS)
  list(APPEND MEGACORE_CUDA_ARCHS 90a 100a)
  list(REMOVE_DUPLICATES MEGACORE_CUDA_ARCHS)
  set(archs_are_found YES)
endif()
if(NOT wanted STREQUAL "OFF")
  if(CMAKE_VERSION VERSION_LESS 3.26)
    message(FATAL_ERROR "CUDA kernels need CMake 3.26 or newer, got ${CMAKE_VERSION}; MEGACORE_CUDA=OFF builds without")
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(MEGACORE_HAS_NVCC yes)
    if(archs_are_found)
      megacore_drop_unknown_archs(MEGACORE_CUDA_ARCHS)
      if(MEGACORE_CUDA_ARCHS STREQUAL "")
        set(MEGACORE_HAS_NVCC no)
      endif()
    endif()
    if(MEGACORE_HAS_NVCC)
      message(STATUS "CUDA kernels are built for ${MEGACORE_CUDA_ARCHS}")
    endif()
  elseif(MEGACORE_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "MEGACORE_CUDA=ON, but no CUDA compiler works here. Put nvcc on PATH or set CUDACXX to it; "
      "or use MEGACORE_CUDA=AUTO (CUDA only where a GPU and nvcc are found) or OFF.")
  else()
    # Not a WARNING: CMake breaks its lines, and make shows the first one.
    message(NOTICE
      "CUDA kernels left out: a GPU or MEGACORE_CUDA_ARCHS asks for them, but no CUDA compiler works here. Put nvcc "
      "on PATH or set CUDACXX to it. MEGACORE_CUDA=OFF silences this, MEGACORE_CUDA=ON makes it an error.")
  endif()
endif()
