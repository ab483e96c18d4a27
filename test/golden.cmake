# Golden vectors as tests.  The programs take a directory, so further sets of the same form can be checked without a rebuild.
foreach(set qwen3 llama3)
  add_test(NAME golden_target_${set} COMMAND golden_target ${CMAKE_CURRENT_SOURCE_DIR}/goldens/targets/${set})
endforeach()
foreach(set dflash_b sf_fp32 sf_fp32_swa sf_fp32_dpace)
  add_test(NAME golden_dflash_${set} COMMAND golden_dflash ${CMAKE_CURRENT_SOURCE_DIR}/goldens/dflash/${set})
endforeach()
