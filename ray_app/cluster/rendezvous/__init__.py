"""Which workers step together: the rendezvous that forms generations, its members and connections, and a worker's end of them."""
