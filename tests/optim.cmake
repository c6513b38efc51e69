
zerofp8_test(engine_matrix_test zerofp8)
zerofp8_mpi_test(engine_mpi_test zerofp8)
