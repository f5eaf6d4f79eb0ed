"""Fields as a task decodes them: rows of different length, encoded images, transforms and the random numbers of a row."""
