# Formats, kernels, partition and the arithmetic beside them.
add_library(zerofp8_test_device STATIC emulated_device.cc device_as_ops.cc)
target_link_libraries(zerofp8_test_device PUBLIC zerofp8_kernels)
target_compile_options(zerofp8_test_device PRIVATE -ffp-contract=off)
target_include_directories(zerofp8_test_device PUBLIC ${PROJECT_SOURCE_DIR})
zerofp8_warnings(zerofp8_test_device)

zerofp8_test(formats_test zerofp8_kernels)
zerofp8_test(formats_slow_test zerofp8_kernels)
zerofp8_test(blocks_test zerofp8_test_device)
zerofp8_test(random_test zerofp8_kernels)
zerofp8_test(masters_test zerofp8_kernels)
zerofp8_test(adam_kernel_test zerofp8_test_device)
zerofp8_test(adam_guard_test zerofp8_test_device)

zerofp8_test(isa_test zerofp8_test_device)
foreach(isa IN ITEMS base v3 v4 v5 BASE avx2)
  add_test(NAME isa_forced_${isa} COMMAND isa_test --gtest_filter=Isa.EnvironmentVariableForcesATable)
  set_tests_properties(isa_forced_${isa} PROPERTIES ENVIRONMENT ZEROFP8_ISA=${isa})
endforeach()

# Not with sanitizers: their checks keep loops from being vectorised and add symbols.
find_package(Python3 COMPONENTS Interpreter)
if(Python3_Interpreter_FOUND AND TARGET zerofp8_isa_v4 AND NOT ZEROFP8_SANITIZE)
  foreach(row IN ITEMS "base none 0" "v3 ymm 40" "v4 zmm 20")
    separate_arguments(row)
    list(POP_FRONT row isa)
    add_test(NAME isa_object_${isa} COMMAND Python3::Interpreter
      ${CMAKE_CURRENT_SOURCE_DIR}/check_isa_object.py $<TARGET_OBJECTS:zerofp8_isa_${isa}> ${isa} ${row})
  endforeach()
endif()

if(ZEROFP8_WITH_CUDA)
  find_program(ZEROFP8_CUOBJDUMP cuobjdump HINTS ${CUDAToolkit_BIN_DIR})
  if(ZEROFP8_CUOBJDUMP)
    add_test(NAME cuda_object COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/check_cuda_object.py
      $<TARGET_OBJECTS:zerofp8_cuda_ops> $<TARGET_OBJECTS:zerofp8_cuda_step> ${ZEROFP8_CUOBJDUMP} sm_80 sm_90 sm_100)
  else()
    message(WARNING "no cuobjdump (requirements-cuda.txt): registers and spills of CUDA kernels are not checked")
  endif()
endif()

zerofp8_test(partition_test zerofp8_partition)
zerofp8_test(reduce_scatter_test zerofp8_kernels)
zerofp8_test(accumulator_kernel_test zerofp8_test_device)
zerofp8_test(device_test zerofp8_test_device)
zerofp8_test(device_sums_test zerofp8_test_device)
zerofp8_test(device_formats_test zerofp8_test_device)
zerofp8_test(device_step_test zerofp8_test_device)
# What the CPU's kernels have to show, shown by the emulated device ones.
foreach(test IN ITEMS blocks_test adam_kernel_test adam_guard_test accumulator_kernel_test)
  add_test(NAME ${test}_on_emulated COMMAND ${test} --gtest_brief=1)
  set_tests_properties(${test}_on_emulated PROPERTIES ENVIRONMENT ZEROFP8_TEST_OPS=emulated TIMEOUT 900 LABELS ${test})
endforeach()

zerofp8_test(scalar_test zerofp8_optim)

# The CUDA kernels without a GPU: nvcc's PTX of them, run on the host by a machine that takes the place of the CUDA
# runtime in a test program. The machine is tested everywhere.
add_library(zerofp8_ptx_machine STATIC ptx/program.cc ptx/machine.cc ptx/operations.cc)
target_compile_options(zerofp8_ptx_machine PRIVATE -ffp-contract=off)
target_link_libraries(zerofp8_ptx_machine PUBLIC fmt::fmt)
target_include_directories(zerofp8_ptx_machine PUBLIC ${PROJECT_SOURCE_DIR})
zerofp8_warnings(zerofp8_ptx_machine)
zerofp8_test(ptx_machine_test zerofp8_ptx_machine)

if(ZEROFP8_WITH_CUDA)
  foreach(part IN ITEMS ops step)
    zerofp8_cuda_object(zerofp8_ptx_${part} cuda_${part}.cu)
    set_target_properties(zerofp8_ptx_${part} PROPERTIES CUDA_PTX_COMPILATION ON CUDA_ARCHITECTURES 80-virtual)
  endforeach()
  add_library(zerofp8_ptx_runtime OBJECT ptx/runtime.cc)
  target_compile_definitions(zerofp8_ptx_runtime PRIVATE
    "ZEROFP8_PTX_FILES=\"$<JOIN:$<TARGET_OBJECTS:zerofp8_ptx_ops>;$<TARGET_OBJECTS:zerofp8_ptx_step>,:>\"")
  target_link_libraries(zerofp8_ptx_runtime PRIVATE zerofp8_ptx_machine CUDA::cudart_static)
  zerofp8_warnings(zerofp8_ptx_runtime)
  add_custom_target(ptx_tests)
  # A test program with the machine in it: "cuda" is a device there.
  function(zerofp8_ptx_test test environment filter)
    add_executable(${test}_on_ptx $<TARGET_OBJECTS:${test}> $<TARGET_OBJECTS:zerofp8_ptx_runtime>)
    get_target_property(libraries ${test} LINK_LIBRARIES)
    target_link_libraries(${test}_on_ptx PRIVATE ${libraries} zerofp8_ptx_machine)
    add_dependencies(${test}_on_ptx zerofp8_ptx_ops zerofp8_ptx_step)
    add_dependencies(ptx_tests ${test}_on_ptx)
    add_test(NAME ${test}_on_ptx COMMAND ${test}_on_ptx --gtest_brief=1 --gtest_filter=${filter})
    set_tests_properties(${test}_on_ptx PROPERTIES TIMEOUT 900 LABELS ptx
      ENVIRONMENT "${environment};ZEROFP8_PTX_MET=${CMAKE_CURRENT_BINARY_DIR}/${test}.ptx_met"
      FAIL_REGULAR_EXPRESSION "] 0 tests from")  # a filter gone blind
    set_property(GLOBAL APPEND PROPERTY zerofp8_ptx_tests ${test})
  endfunction()
  foreach(test IN ITEMS device_test device_sums_test device_formats_test device_step_test)
    zerofp8_ptx_test(${test} "" "*cuda*:Cuda*")
  endforeach()
  foreach(test IN ITEMS isa_test blocks_test adam_kernel_test accumulator_kernel_test)
    zerofp8_ptx_test(${test} ZEROFP8_TEST_OPS=cuda "*")
  endforeach()
  zerofp8_ptx_test(adam_guard_test ZEROFP8_TEST_OPS=cuda "*/90_9500")  # every pair of betas takes two minutes
endif()
