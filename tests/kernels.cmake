# Formats, kernels, partition and the arithmetic beside them.
zerofp8_test(formats_test zerofp8_kernels)
