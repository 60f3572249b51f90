# What every target shares: C++20, warnings, hidden symbols, sanitizers, ccache.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_program(CCACHE ccache)
if(CCACHE)
  # Paths relative to the source folder, so that all clones share one cache.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${CCACHE})
endif()

find_package(Threads REQUIRED)

if(ZINF_SANITIZE)
  add_compile_options(-fsanitize=${ZINF_SANITIZE} -fno-omit-frame-pointer
                      -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ZINF_SANITIZE})
endif()

# Warnings for our own code; includes are written from the project's root.
# g++ 12 sees overlaps in "text" + std::string that are not there (its bug 105651).
add_library(zinf_options INTERFACE)
target_compile_options(
  zinf_options INTERFACE -Wall -Wextra -Werror
                         $<$<CXX_COMPILER_ID:GNU>:-Wshadow=local;-Wno-restrict>
                         $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>)
target_include_directories(zinf_options INTERFACE ${PROJECT_SOURCE_DIR}
                                                  ${PROJECT_SOURCE_DIR}/include)

# zinf_library(NAME SOURCES a.cpp ... DEPS zinf_base ...)
function(zinf_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC $<BUILD_INTERFACE:zinf_options> ${ARG_DEPS})
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_link_libraries(${name} PRIVATE ${ARG_PRIVATE_DEPS})
endfunction()
