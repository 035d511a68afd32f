-- Returns the note, or nil if it has expired or if another program wrote it.
local NOTE_HEAD = 22 -- bytes; include/steps.lua

local function live_note(note)
    if not note or #note < NOTE_HEAD then return nil end
    local expires_at = struct.unpack('>I8', note, 15)
    return (expires_at == 0 or expires_at > now) and note or nil
end
