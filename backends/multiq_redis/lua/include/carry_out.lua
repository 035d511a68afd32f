-- Carries out steps without a verdict.
local function version_of(name)
    local note = redis.call('HGET', key.notes, name)
    if not note then return '' end
    local expires_at = unpacked('>I8', note, 15)
    return (expires_at == 0 or expires_at > now) and sub(note, 1, 14) or ''
end

local function carry_out()
    local seen = earlier_answer()
    if seen then return seen end
    check_types()
    local conditions = tonumber(ARGV[3])
    for i = 1, conditions do
        if version_of(ARGV[2 * i + 2]) ~= ARGV[2 * i + 3] then return remember('0') end
    end
    remember('1') -- on Redis 6.2 the first write decides whether the script may run at maxmemory
    carry_out_steps(4 + 2 * conditions, #ARGV)
    forward(nil, 0, token .. '\255\255')
    finish_steps()
    return '1'
end

return { carry_out(), first_of_outbox() }
