# The target torch_stable: headers and libraries of the installed torch, for the LibTorch stable ABI.
#
# torch is found without find_package(Torch), in this order: -DTORCH_DIR or the environment's TORCH_DIR; the Python that
# runs the build; the environment the user stands in. Under pip's build isolation the first Python is the right one
# but cannot see torch, because pip hides site-packages through PYTHONPATH: python -I ignores that.
set(TORCH_DIR "$ENV{TORCH_DIR}" CACHE PATH "The installed torch package, .../site-packages/torch")

function(flashsci_find_torch result)
  set(candidates "${Python_EXECUTABLE}")
  foreach(prefix "$ENV{VIRTUAL_ENV}" "$ENV{CONDA_PREFIX}")
    if(NOT prefix STREQUAL "")
      list(APPEND candidates "${prefix}/bin/python")
    endif()
  endforeach()
  string(REPLACE ":" ";" path "$ENV{PATH}")
  foreach(folder IN LISTS path)
    list(APPEND candidates "${folder}/python3" "${folder}/python")
  endforeach()
  list(REMOVE_DUPLICATES candidates)
  foreach(python IN LISTS candidates)
    if(EXISTS "${python}")
      execute_process(
        COMMAND "${python}" -I -c
                "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '', end='')"
        OUTPUT_VARIABLE found ERROR_QUIET RESULT_VARIABLE status)
      if(status EQUAL 0 AND EXISTS "${found}/include/torch/csrc/stable/library.h")
        message(STATUS "flashsci: torch of ${python}")
        set(${result} "${found}" PARENT_SCOPE)
        return()
      elseif(status EQUAL 0 AND NOT found STREQUAL "")
        message(STATUS "flashsci: ${found} has no stable ABI headers (torch >= 2.10 is needed)")
      endif()
    endif()
  endforeach()
endfunction()

if(NOT TORCH_DIR)
  flashsci_find_torch(TORCH_DIR)
endif()
if(NOT EXISTS "${TORCH_DIR}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR
    "flashsci: torch >= 2.10 was not found, and the CUDA kernels are built against its headers.\n"
    "  Install it first (pip install torch), then one of\n"
    "    pip install .                                                 from the environment that has torch\n"
    "    pip install . --no-build-isolation                            the same, without a build environment\n"
    "    pip install . -C cmake.define.TORCH_DIR=/path/to/site-packages/torch\n"
    "  Without any CUDA kernels: hide nvcc (CUDACXX=none) and install again.")
endif()
message(STATUS "flashsci: torch headers in ${TORCH_DIR}")

add_library(torch_stable INTERFACE)
target_include_directories(torch_stable SYSTEM INTERFACE "${TORCH_DIR}/include")
# 2.10: runs on every torch from 2.10 on, whatever headers it was built with.
target_compile_definitions(torch_stable INTERFACE TORCH_TARGET_VERSION=0x020a000000000000ULL)
# libtorch.so stands for libtorch_cpu in CPU wheels and for libtorch_cpu and libtorch_cuda in CUDA wheels.
target_link_options(torch_stable INTERFACE "LINKER:--no-as-needed")
target_link_libraries(torch_stable INTERFACE "${TORCH_DIR}/lib/libtorch.so" "${TORCH_DIR}/lib/libtorch_cpu.so")
