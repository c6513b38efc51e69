# zerofp8_layer(NAME SOURCES... ): one static library per layer of the design; headers from include/.
function(zerofp8_layer name)
  add_library(zerofp8_${name} STATIC ${ARGN})
  add_library(zerofp8::${name} ALIAS zerofp8_${name})
  set_target_properties(zerofp8_${name} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(zerofp8_${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_features(zerofp8_${name} PUBLIC cxx_std_20)
  # The scalars of a step have the same bits on every machine; compilers contract where there is fma.
  target_compile_options(zerofp8_${name} PRIVATE -ffp-contract=off)
  zerofp8_warnings(zerofp8_${name})
endfunction()

function(zerofp8_warnings target)
  # -Wno-restrict: g++ 12 warns falsely about string concatenation (GCC bug 105651).
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict> -Wall -Wextra -Wpedantic -Wshadow -Wno-missing-field-initializers)
  if(ZEROFP8_SANITIZE)
    string(REPLACE ";" "," list "${ZEROFP8_SANITIZE}")
    target_compile_options(${target} PUBLIC -fsanitize=${list} -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${list})
  endif()
endfunction()
