# Formats, kernels, partition and the arithmetic beside them.
zerofp8_test(formats_test zerofp8_kernels)
zerofp8_test(formats_slow_test zerofp8_kernels)
zerofp8_test(blocks_test zerofp8_kernels)
zerofp8_test(random_test zerofp8_kernels)
zerofp8_test(masters_test zerofp8_kernels)
zerofp8_test(adam_kernel_test zerofp8_kernels)
zerofp8_test(adam_guard_test zerofp8_kernels)

zerofp8_test(isa_test zerofp8_kernels)
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

zerofp8_test(partition_test zerofp8_partition)
zerofp8_test(reduce_scatter_test zerofp8_kernels)
zerofp8_test(accumulator_kernel_test zerofp8_kernels)
zerofp8_test(scalar_test zerofp8_optim)
