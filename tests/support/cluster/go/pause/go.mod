module firn.dev/pause

go 1.24.0
