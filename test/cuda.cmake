# The cuda kernels on the emulated device, where there is no other one.  Sanitized builds link differently; they have the unit tests.
if(MR_SANITIZE STREQUAL "none")
  add_test(NAME drafter_emulated COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/golden_emu.sh ${CMAKE_BINARY_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/goldens/dflash/dflash_b
           ${CMAKE_CURRENT_SOURCE_DIR}/goldens/dflash/sf_fp32)
  set_tests_properties(drafter_emulated PROPERTIES TIMEOUT 900 SKIP_RETURN_CODE 77)
  add_test(NAME cuda_emulated COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/cuda_emu.sh ${CMAKE_BINARY_DIR})
  set_tests_properties(cuda_emulated PROPERTIES TIMEOUT 900 SKIP_RETURN_CODE 77)
endif()
