# Tests of the repository itself.
find_package(Python3 COMPONENTS Interpreter REQUIRED)
add_test(NAME house_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/house_test.py)
if(NOT ZEROFP8_SANITIZE)
  add_test(NAME consume_test
           COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/consume_test.sh ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR})
  set_tests_properties(consume_test PROPERTIES TIMEOUT 900 PROCESSORS 2)
endif()
if(TARGET train_gpt AND ZEROFP8_WITH_MPI)
  add_test(NAME example_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/example_test.py
                                     $<TARGET_FILE:train_gpt>)
  set_tests_properties(example_test PROPERTIES TIMEOUT 900 PROCESSORS 2)
endif()

# Against LibTorch's own optimizers; built with the example, which finds LibTorch.
if(TARGET train_gpt)
  zerofp8_test(torch_adamw_test zerofp8 zerofp8_torch)
endif()
