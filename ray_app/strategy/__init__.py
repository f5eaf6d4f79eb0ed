"""How the gradients of the logical workers meet: the exchange of a step, see `Strategy`.

Two are here, `DataParallel` (`ddp`) and `FullySharded` (`fsdp`); `build` chooses. The others of `train.strategy` exchange with
`DataParallel` and differ in what is kept and how a step goes: `ray_app.train.build` says where. Besides: the fixed tree (`reduce`), and
which parameter server holds what (`partition`).
"""
