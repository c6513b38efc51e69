# Formats, kernels, partition and the arithmetic beside them.
zerofp8_test(formats_test zerofp8_kernels)
zerofp8_test(formats_slow_test zerofp8_kernels)
zerofp8_test(blocks_test zerofp8_kernels)
zerofp8_test(random_test zerofp8_kernels)
zerofp8_test(masters_test zerofp8_kernels)
zerofp8_test(adam_kernel_test zerofp8_kernels)
zerofp8_test(adam_guard_test zerofp8_kernels)
