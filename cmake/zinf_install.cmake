# The C++ package: find_package(zinf) gives zinf::zinf, or without torch the
# parts (zinf::engine, zinf::tier, ...); its component mpi gives zinf::mpi.
# Nothing in it needs Python.
include(CMakePackageConfigHelpers)
set(package lib/cmake/zinf)
set(parts base io mem optim sched plan shard tier engine)
set(headers ${PROJECT_SOURCE_DIR}/include/zinf)
if(ZINF_TORCH)
  list(APPEND parts torch)
  list(APPEND headers ${PROJECT_SOURCE_DIR}/adapters/torch/include/zinf)
endif()

foreach(part ${parts})
  set_target_properties(zinf_${part} PROPERTIES EXPORT_NAME ${part})
  install(TARGETS zinf_${part} EXPORT zinf ARCHIVE DESTINATION lib INCLUDES
          DESTINATION include)
endforeach()
if(ZINF_TORCH)
  set_target_properties(zinf_torch PROPERTIES EXPORT_NAME zinf)
endif()
if(TARGET zinf_mpi)
  set_target_properties(zinf_mpi PROPERTIES EXPORT_NAME mpi)
  install(TARGETS zinf_mpi EXPORT zinf_mpi ARCHIVE DESTINATION lib INCLUDES
          DESTINATION include)
  install(EXPORT zinf_mpi NAMESPACE zinf:: FILE zinf-mpi-targets.cmake
          DESTINATION ${package})
  list(APPEND headers ${PROJECT_SOURCE_DIR}/adapters/mpi/include/zinf)
endif()
install(DIRECTORY ${headers} DESTINATION include)

# What `cmake --install` installs, without tests and benchmarks.
list(TRANSFORM parts PREPEND zinf_ OUTPUT_VARIABLE installed)
add_custom_target(zinf_package DEPENDS zinf ${installed})
foreach(target zinf_mpi _C _emulated)
  if(TARGET ${target})
    add_dependencies(zinf_package ${target})
  endif()
endforeach()
# Its own copy: who links zinf does not need liburing.
install(FILES ${URING_STATIC} DESTINATION lib RENAME libzinf_uring.a)

install(EXPORT zinf NAMESPACE zinf:: FILE zinf-targets.cmake DESTINATION ${package})
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/zinf-config.cmake.in
  ${PROJECT_BINARY_DIR}/zinf-config.cmake INSTALL_DESTINATION ${package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/zinf-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(
  FILES ${PROJECT_BINARY_DIR}/zinf-config.cmake
        ${PROJECT_BINARY_DIR}/zinf-config-version.cmake
        ${PROJECT_SOURCE_DIR}/cmake/zinf_import_torch.cmake
  DESTINATION ${package})
