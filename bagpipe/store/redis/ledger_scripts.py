"""Lua scripts of `RedisLedger`: one call per bucket, all or nothing, safe to repeat.

KEYS: bucket, owner, checkpoint id, set of logs, open, job record. ARGV[1]: the caller's token. A script that changes
anything returns OK; LOST, if acknowledged rows are missing; or the owner's token, if that is not the caller's.

The key `open` does not exist while a script runs. Naming it makes a cluster's node answer TRYAGAIN while the bucket's
slot moves; otherwise a script could find a bucket without its logs.
"""

from __future__ import annotations

__all__ = [
    "ACQUIRE",
    "BEGIN",
    "CLEAR",
    "COMMIT",
    "DELETE",
    "DROP",
    "INVALIDATE",
    "JOB",
    "RECORD_JOB",
    "RELEASE",
    "STATE",
]

#: Returns owner, checkpoint id, number of rows, then name and length of each log; length 0: the log is missing.
STATE = """
local found = {redis.call('GET', KEYS[2]) or '', redis.call('GET', KEYS[3]) or '', redis.call('HLEN', KEYS[1])}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  local length = redis.call('LLEN', KEYS[1] .. ':log:' .. name)
  if length == 0 then length = redis.call('LLEN', KEYS[1] .. ':fenced:' .. name) end
  table.insert(found, name)
  table.insert(found, length)
end
return found
"""

#: ARGV[2]: suffix of invalidated checkpoint ids.
ACQUIRE = """
local checkpoint_id = redis.call('GET', KEYS[3]) or ''
if checkpoint_id ~= '' and redis.call('EXISTS', KEYS[4]) == 0 and string.sub(checkpoint_id, -#ARGV[2]) ~= ARGV[2] then
  redis.call('SET', KEYS[3], checkpoint_id .. ARGV[2])
end
for _, name in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  local log = KEYS[1] .. ':log:' .. name
  if string.sub(name, 1, #ARGV[1] + 1) ~= ARGV[1] .. ':' and redis.call('EXISTS', log) == 1 then
    redis.call('RENAME', log, KEYS[1] .. ':fenced:' .. name)
  end
end
local name = ARGV[1] .. ':0:0'
if redis.call('SADD', KEYS[4], name) == 1 then redis.call('RPUSH', KEYS[1] .. ':log:' .. name, '') end
redis.call('SET', KEYS[2], ARGV[1])
return 'OK'
"""

_CHECK_OWNER = """
local owner = redis.call('GET', KEYS[2]) or ''
if owner ~= ARGV[1] then return owner end
"""

#: ARGV[2..5]: checkpoint id, number of writers, groups in the recovery log, rows of the bucket (-1: any number).
BEGIN = (
    _CHECK_OWNER
    + """
local names, recovery, has_begun = redis.call('SMEMBERS', KEYS[4]), ARGV[1] .. ':0:0', true
for _, name in ipairs(names) do has_begun = has_begun and name ~= recovery end
if has_begun then return 'OK' end
if redis.call('LLEN', KEYS[1] .. ':log:' .. recovery) ~= tonumber(ARGV[4]) + 1 then return 'LOST' end
if ARGV[5] ~= '-1' and redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[5]) then return 'LOST' end
for _, name in ipairs(names) do
  redis.call('UNLINK', KEYS[1] .. ':log:' .. name, KEYS[1] .. ':fenced:' .. name)
end
redis.call('DEL', KEYS[4])
redis.call('SET', KEYS[3], ARGV[2])
for writer = 0, tonumber(ARGV[3]) - 1 do
  local name = string.format('%s:1:%d', ARGV[1], writer)
  redis.call('SADD', KEYS[4], name)
  redis.call('RPUSH', KEYS[1] .. ':log:' .. name, '')
end
return 'OK'
"""
)

#: ARGV[2..4]: checkpoint id, epoch, suffix of invalidated checkpoint ids; then groups in the log of each writer.
COMMIT = (
    _CHECK_OWNER
    + """
local checkpoint_id = redis.call('GET', KEYS[3]) or ''
local is_invalid = string.sub(checkpoint_id, -#ARGV[4]) == ARGV[4]
if checkpoint_id ~= '' and (checkpoint_id == ARGV[2] or is_invalid) then return 'OK' end
for number = 5, #ARGV do
  local log = string.format('%s:log:%s:%s:%d', KEYS[1], ARGV[1], ARGV[3], number - 5)
  if redis.call('LLEN', log) ~= tonumber(ARGV[number]) + 1 then return 'LOST' end
end
for _, name in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  local token, epoch = string.match(name, '^(.*):(%d+):%d+$')
  if token == ARGV[1] and tonumber(epoch) <= tonumber(ARGV[3]) then
    redis.call('UNLINK', KEYS[1] .. ':log:' .. name)
    redis.call('SREM', KEYS[4], name)
  end
end
redis.call('SET', KEYS[3], ARGV[2])
return 'OK'
"""
)

#: ARGV[2]: checkpoint id.
INVALIDATE = _CHECK_OWNER + "redis.call('SET', KEYS[3], ARGV[2]) return 'OK'"

#: Removes all rows of the bucket.
DROP = _CHECK_OWNER + "redis.call('UNLINK', KEYS[1]) return 'OK'"

#: ARGV[2..]: fields to remove; Lua's unpack fails near 8,000.
DELETE = _CHECK_OWNER + "redis.call('HDEL', KEYS[1], unpack(ARGV, 2)) return 'OK'"

#: Returns the fields of the job record: name, value, name, value, …
JOB = "return redis.call('HGETALL', KEYS[6])"

#: ARGV[2..]: name, value, name, value, …
RECORD_JOB = _CHECK_OWNER + "redis.call('DEL', KEYS[6]) redis.call('HSET', KEYS[6], unpack(ARGV, 2)) return 'OK'"

#: Removes everything of the bucket but its owner.
CLEAR = (
    _CHECK_OWNER
    + """
for _, name in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  redis.call('UNLINK', KEYS[1] .. ':log:' .. name, KEYS[1] .. ':fenced:' .. name)
end
redis.call('UNLINK', KEYS[1], KEYS[3], KEYS[4], KEYS[6])
return 'OK'
"""
)

#: Removes the owner. A bucket without one was released by an earlier call.
RELEASE = """
local owner = redis.call('GET', KEYS[2]) or ''
if owner == ARGV[1] then redis.call('DEL', KEYS[2]) elseif owner ~= '' then return owner end
return 'OK'
"""
