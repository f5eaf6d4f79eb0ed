"""What is there: the files of a data set on a disk or S3, their columns as arrays, and their contents, before any row is read."""
