// The first process of a pod's sandbox and of a node: keeps its namespaces, buries orphans, ends when asked to.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGTERM, syscall.SIGINT)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if buried, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || buried <= 0 {
				break
			}
		}
	}
}
