"""Communication between the ranks of a job.

membership.Membership            rank and world size, from the launcher's environment
launcher.follow_launcher         a rank ends with its launcher
interface.Peers                  operations the engine needs: exchange rows, vote on a batch, acknowledge a write-back
process_groups.TorchPeers        `Peers` over torch.distributed: one process group with deadlines per lane
collectives.LaneGroup            one lane's process group
evaluation_peers                 the same for an evaluation beside a training that rests
plain_group.PlainGroup           a process group of a program of one's own as a group of ranks
links.TorchLinks                 point-to-point transfers between pipeline stages
control_channel.ControlChannel   control messages between phases, without a deadline
failure.Failures                 failure reports and heartbeats in the job's key-value store
error_line.print_once            the job's error line, printed by one rank
keystore.KeyStore                client of that store with a deadline per request
"""
