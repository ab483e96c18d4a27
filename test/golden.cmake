# Golden vectors as tests.  The programs take a directory, so further sets of the same form can be checked without a rebuild.
foreach(set qwen3 llama3)
  add_test(NAME golden_target_${set} COMMAND golden_target ${CMAKE_CURRENT_SOURCE_DIR}/goldens/targets/${set})
endforeach()
foreach(set dflash_b sf_fp32)
  add_test(NAME golden_dflash_${set} COMMAND golden_dflash ${CMAKE_CURRENT_SOURCE_DIR}/goldens/dflash/${set})
endforeach()

# A whole run in one process: for profiling, and as the yardstick of what the runtime costs.
add_executable(train_demo train_demo.c)
target_link_libraries(train_demo PRIVATE mr_actors)
