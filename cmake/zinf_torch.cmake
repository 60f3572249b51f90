# Imports the torch wheel's libraries by hand: find_package(Torch) demands a CUDA
# toolkit on CUDA wheels, and everything zinf uses lives in libc10 and
# libtorch_cpu, which every wheel has.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
          "import importlib.util as u; s = u.find_spec('torch'); \
print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE ZINF_TORCH_DIR
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT ZINF_TORCH_DIR)
  message(FATAL_ERROR "torch is not installed for ${Python_EXECUTABLE}: run "
                      "'make setup', or build without it (-DZINF_TORCH=OFF)")
endif()

set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
                                       ${ZINF_TORCH_DIR}/version.py)
file(STRINGS ${ZINF_TORCH_DIR}/version.py line REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+[^']*" ZINF_TORCH_VERSION "${line}")
if(NOT ZINF_TORCH_VERSION MATCHES "^2\\.13\\.")
  message(FATAL_ERROR "zinf is written for torch 2.13, found "
                      "${ZINF_TORCH_VERSION} in ${ZINF_TORCH_DIR}: "
                      "pip install torch==2.13.0")
endif()
message(STATUS "torch ${ZINF_TORCH_VERSION} in ${ZINF_TORCH_DIR}")

include(zinf_import_torch)
zinf_import_torch_libraries(${ZINF_TORCH_DIR})
zinf_import_torch(${ZINF_TORCH_DIR} torch::python torch_python)
target_link_libraries(torch::python INTERFACE torch::cpu)
