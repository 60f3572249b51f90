# The libraries of a torch wheel or of libtorch as imported targets torch::c10,
# torch::cpu and, for Python modules, torch::python. Also installed: it is how
# find_package(zinf) takes torch.

# zinf_import_torch(DIRECTORY target library): DIRECTORY has lib/ and include/.
function(zinf_import_torch directory target library)
  if(TARGET ${target})
    return()
  endif()
  add_library(${target} SHARED IMPORTED GLOBAL)
  set_target_properties(
    ${target}
    PROPERTIES
      IMPORTED_LOCATION ${directory}/lib/lib${library}.so
      INTERFACE_INCLUDE_DIRECTORIES
      "${directory}/include;${directory}/include/torch/csrc/api/include")
endfunction()

macro(zinf_import_torch_libraries directory)
  zinf_import_torch(${directory} torch::c10 c10)
  zinf_import_torch(${directory} torch::cpu torch_cpu)
  set_property(TARGET torch::cpu PROPERTY INTERFACE_LINK_LIBRARIES torch::c10)
endmacro()
